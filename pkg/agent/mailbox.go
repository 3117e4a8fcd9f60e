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

// mailbox takes what happens anywhere, for the goroutine whose turn it is. Posting never
// waits.
type mailbox struct {
	mu    sync.Mutex
	mail  []func(*model)
	ready chan struct{}
	// work does what was posted, in the goroutine that calls it; false: another one is at
	// it, and has to come again. Nil: the loop does all.
	work func() bool

	posted func() // told of each change; nil: nobody
	// metrics is told of each change, and of what became of it.
	metrics *metrics.Sync
}

func newMailbox() *mailbox {
	return &mailbox{ready: make(chan struct{}, 1), metrics: metrics.NewSync(time.Now)}
}

// maxNoted is how many changes may wait for a flush.
const maxNoted = 100

// post adds one change of the model. Ready becomes readable.
func (m *mailbox) post(change func(*model)) {
	m.add(change)
	m.wake()
}

// note adds one change of the model. It is worked on at the next flush.
func (m *mailbox) note(change func(*model)) {
	if m.add(change) == maxNoted {
		m.wake()
	}
}

// add returns how many changes wait now.
func (m *mailbox) add(change func(*model)) int {
	m.mu.Lock()
	m.mail = append(m.mail, change)
	waiting := len(m.mail)
	m.mu.Unlock()
	if m.posted != nil {
		m.posted()
	}

	return waiting
}

// wake makes ready readable.
func (m *mailbox) wake() {
	select {
	case m.ready <- struct{}{}:
	default:
	}
}

// flush has the changes worked on that were noted: here and now if that is possible. To wake
// another goroutine costs as much as most changes do.
func (m *mailbox) flush() {
	m.mu.Lock()
	idle, work := len(m.mail) == 0, m.work
	m.mu.Unlock()
	if !idle && (work == nil || !work()) {
		m.wake()
	}
}

// workBy sets what works on changes at a flush.
func (m *mailbox) workBy(work func() bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.work = work
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
	s.note(func(m *model) {
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
	s.note(func(m *model) {
		s.metrics.ServiceRead(metrics.Both, m.state.Service(name) != nil)
		m.state.DeleteService(name)
		m.claimsChanged = true
		m.report("Service "+name.String(), nil)
	})
}

// SetSlice implements [kube.Sink].
func (s sink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	s.metrics.SliceQueued(metrics.FamilyOf(slice.Family))
	s.note(func(m *model) {
		known := m.state.Slice(slice.Name)
		m.state.SetSlice(slice.EndpointSlice)
		s.metrics.SliceRead(&slice.EndpointSlice, m.state.Slice(slice.Name) != known, slice.Triggered)
		m.report("EndpointSlice "+slice.Name.String(), problems)
	})
}

// DeleteSlice implements [kube.Sink].
func (s sink) DeleteSlice(name lb.SliceName) {
	s.metrics.SliceQueued(metrics.None)
	s.note(func(m *model) {
		s.metrics.SliceGone(m.state.Slice(name))
		m.state.DeleteSlice(name)
		m.report("EndpointSlice "+name.String(), nil)
	})
}

// SetNode implements [kube.Sink].
func (s sink) SetNode(node kube.Node, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.note(func(m *model) {
		known := m.node
		m.setNode(node)
		s.metrics.Read(metrics.Both, !reflect.DeepEqual(m.node, known))
		m.report("Node "+node.Name, problems)
	})
}

// SetServiceCIDRs implements [kube.Sink].
func (s sink) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.note(func(m *model) {
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

// Flush implements [kube.Sink].
func (s sink) Flush() { s.flush() }
