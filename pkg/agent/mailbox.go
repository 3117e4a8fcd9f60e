package agent

import (
	"net/netip"
	"sync"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// mailbox takes what happens anywhere, for the one goroutine that owns the
// model. Posting never waits.
type mailbox struct {
	mu    sync.Mutex
	mail  []func(*model)
	ready chan struct{}
}

func newMailbox() *mailbox {
	return &mailbox{ready: make(chan struct{}, 1)}
}

// post adds one change of the model. Ready becomes readable.
func (m *mailbox) post(change func(*model)) {
	m.mu.Lock()
	m.mail = append(m.mail, change)
	m.mu.Unlock()

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
	s.post(func(m *model) {
		m.state.SetService(svc)
		m.report("Service "+svc.Name.String(), problems)
	})
}

// DeleteService implements [kube.Sink].
func (s sink) DeleteService(name lb.ServiceName) {
	s.post(func(m *model) {
		m.state.DeleteService(name)
		m.report("Service "+name.String(), nil)
	})
}

// SetSlice implements [kube.Sink].
func (s sink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	s.post(func(m *model) {
		m.state.SetSlice(slice.EndpointSlice)
		m.report("EndpointSlice "+slice.Name.String(), problems)
	})
}

// DeleteSlice implements [kube.Sink].
func (s sink) DeleteSlice(name lb.SliceName) {
	s.post(func(m *model) {
		m.state.DeleteSlice(name)
		m.report("EndpointSlice "+name.String(), nil)
	})
}

// SetNode implements [kube.Sink].
func (s sink) SetNode(node kube.Node, problems []lb.Problem) {
	s.post(func(m *model) {
		m.setNode(node)
		m.report("Node "+node.Name, problems)
	})
}

// SetServiceCIDRs implements [kube.Sink].
func (s sink) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	s.post(func(m *model) {
		m.serviceCIDRs = prefixes
		m.serviceCIDRsChanged = true
		m.report("ServiceCIDRs", problems)
	})
}

// Report implements [kube.Sink].
func (s sink) Report(source string, problems []lb.Problem) {
	s.post(func(m *model) { m.report(source, problems) })
}
