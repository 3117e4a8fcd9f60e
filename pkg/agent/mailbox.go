package agent

import (
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// mailbox takes what happens anywhere, for the one goroutine that owns the
// model. Posting never waits.
type mailbox struct {
	mu    sync.Mutex
	mail  []func(*model)
	ready chan struct{}

	posted func() // told of each change; nil: nobody
	// metrics is told of each change, and of what became of it.
	metrics *metrics.Sync
}

func newMailbox() *mailbox {
	return &mailbox{ready: make(chan struct{}, 1), metrics: metrics.NewSync(time.Now)}
}

// post adds one change of the model. Ready becomes readable.
func (m *mailbox) post(change func(*model)) {
	m.mu.Lock()
	m.mail = append(m.mail, change)
	m.mu.Unlock()
	if m.posted != nil {
		m.posted()
	}

	select {
	case m.ready <- struct{}{}:
	default:
	}
}

// take returns what was posted since the last call, in order.
func (m *mailbox) take() []func(*model) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mail := m.mail
	m.mail = nil

	return mail
}

// sink is the mailbox as package kube sees it.
type sink struct{ *mailbox }

var _ kube.Sink = sink{}

// SetService implements [kube.Sink].
func (s sink) SetService(svc lb.Service, problems []lb.Problem) {
	s.metrics.ServiceQueued(metrics.FamiliesOf(&svc))
	s.post(func(m *model) {
		known := m.state.Service(svc.Name)
		m.state.SetService(svc)
		m.claimsChanged = true
		s.metrics.ServiceRead(metrics.FamiliesOf(&svc)|metrics.FamiliesOf(known), m.state.Service(svc.Name) != known)
		m.report("Service "+svc.Name.String(), problems)
	})
}

// DeleteService implements [kube.Sink].
func (s sink) DeleteService(name lb.ServiceName) {
	s.metrics.ServiceQueued(metrics.Both)
	s.post(func(m *model) {
		s.metrics.ServiceRead(metrics.Both, m.state.Service(name) != nil)
		m.state.DeleteService(name)
		m.claimsChanged = true
		m.report("Service "+name.String(), nil)
	})
}

// SetSlice implements [kube.Sink].
func (s sink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	s.metrics.SliceQueued(metrics.FamilyOf(slice.Family))
	s.post(func(m *model) {
		known := m.state.Slice(slice.Name)
		m.state.SetSlice(slice.EndpointSlice)
		s.metrics.SliceRead(&slice.EndpointSlice, m.state.Slice(slice.Name) != known, slice.Triggered)
		m.report("EndpointSlice "+slice.Name.String(), problems)
	})
}

// DeleteSlice implements [kube.Sink].
func (s sink) DeleteSlice(name lb.SliceName) {
	s.metrics.SliceQueued(metrics.None)
	s.post(func(m *model) {
		s.metrics.SliceGone(m.state.Slice(name))
		m.state.DeleteSlice(name)
		m.report("EndpointSlice "+name.String(), nil)
	})
}

// SetNode implements [kube.Sink].
func (s sink) SetNode(node kube.Node, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.post(func(m *model) {
		known := m.node
		m.setNode(node)
		s.metrics.Read(metrics.Both, !reflect.DeepEqual(m.node, known))
		m.report("Node "+node.Name, problems)
	})
}

// SetServiceCIDRs implements [kube.Sink].
func (s sink) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.post(func(m *model) {
		s.metrics.Read(metrics.Both, !slices.Equal(prefixes, m.serviceCIDRs))
		m.serviceCIDRs = prefixes
		m.serviceCIDRsChanged = true
		m.report("ServiceCIDRs", problems)
	})
}

// Report implements [kube.Sink].
func (s sink) Report(source string, problems []lb.Problem) {
	s.post(func(m *model) { m.report(source, problems) })
}
