package agent

import (
	"net/netip"
	"reflect"
	"slices"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
)

// sink queues what package kube reads as changes of the model, and counts it.
type sink struct {
	*queue.Queue[*model]
	metrics *metrics.Sync
}

var _ kube.Sink = sink{}

// SetService implements [kube.Sink].
func (s sink) SetService(svc lb.Service, problems []lb.Problem) {
	s.metrics.ServiceQueued(metrics.FamiliesOf(&svc))
	s.Batch(func(m *model) {
		known := m.state.Service(svc.Name)
		m.state.SetService(svc)
		m.setOther(svc.Name, &svc)
		m.claimsChanged = true
		s.metrics.ServiceRead(metrics.FamiliesOf(&svc)|metrics.FamiliesOf(known), m.state.Service(svc.Name) != known)
		m.report("Service "+svc.Name.String(), problems)
	})
}

// DeleteService implements [kube.Sink].
func (s sink) DeleteService(name lb.ServiceName) {
	s.metrics.ServiceQueued(metrics.Both)
	s.Batch(func(m *model) {
		s.metrics.ServiceRead(metrics.Both, m.state.Service(name) != nil)
		m.state.DeleteService(name)
		m.setOther(name, nil)
		m.claimsChanged = true
		m.report("Service "+name.String(), nil)
	})
}

// SetSlice implements [kube.Sink].
func (s sink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	s.metrics.SliceQueued(metrics.FamilyOf(slice.Family))
	s.Batch(func(m *model) {
		known := m.state.Slice(slice.Name)
		m.state.SetSlice(slice.EndpointSlice)
		s.metrics.SliceRead(&slice.EndpointSlice, m.state.Slice(slice.Name) != known, slice.Triggered)
		m.report("EndpointSlice "+slice.Name.String(), problems)
	})
}

// DeleteSlice implements [kube.Sink].
func (s sink) DeleteSlice(name lb.SliceName) {
	s.metrics.SliceQueued(metrics.None)
	s.Batch(func(m *model) {
		s.metrics.SliceGone(m.state.Slice(name))
		m.state.DeleteSlice(name)
		m.report("EndpointSlice "+name.String(), nil)
	})
}

// SetNode implements [kube.Sink].
func (s sink) SetNode(node kube.Node, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.Batch(func(m *model) {
		known := m.node
		m.setNode(node)
		s.metrics.Read(metrics.Both, !reflect.DeepEqual(m.node, known))
		m.report("Node "+node.Name, problems)
	})
}

// SetServiceCIDRs implements [kube.Sink].
func (s sink) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.Batch(func(m *model) {
		s.metrics.Read(metrics.Both, !slices.Equal(prefixes, m.serviceCIDRs))
		m.serviceCIDRs = prefixes
		m.serviceCIDRsChanged = true
		m.report("ServiceCIDRs", problems)
	})
}

// SetDialed implements [kube.Sink].
func (s sink) SetDialed(addr netip.AddrPort) {
	s.Enqueue(func(m *model) { m.setDialed(addr) })
}

// SetPod implements [kube.Sink].
func (s sink) SetPod(pod kube.Pod, problems []lb.Problem) {
	s.Batch(func(m *model) {
		m.optOuts.SetPod(pod)
		m.report("Pod "+pod.Namespace+"/"+pod.Name, problems)
	})
}

// SetNamespace implements [kube.Sink].
func (s sink) SetNamespace(namespace kube.Namespace, problems []lb.Problem) {
	s.Batch(func(m *model) {
		m.optOuts.SetNamespace(namespace)
		m.report("Namespace "+namespace.Name, problems)
	})
}

// Unread implements [kube.Sink].
func (s sink) Unread(source string, service lb.ServiceName, problems []lb.Problem) {
	s.Batch(func(m *model) {
		m.report(source, problems)
		m.unread[source] = service
		m.unreadOf[service]++
	})
}

// ReportGone implements [kube.Sink].
func (s sink) ReportGone(kind string, gone, known int) {
	s.metrics.Gone(kind, gone)
	s.Enqueue(func(m *model) {
		m.log.Warn("many objects have gone in one list of the API server", "kind", kind, "gone", gone, "known", known)
		m.events.Gone(kind, gone, known)
	})
}

// Report implements [kube.Sink].
func (s sink) Report(source string, problems []lb.Problem) {
	s.Enqueue(func(m *model) { m.report(source, problems) })
}
