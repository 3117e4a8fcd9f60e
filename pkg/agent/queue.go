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

// eventQueue holds the changes of the model that any goroutine has reported, until the
// goroutine that has the turn applies them. No method waits for that goroutine.
type eventQueue struct {
	mu     sync.Mutex
	events []func(*model)
	ready  chan struct{}
	// turn has the worker in it while no goroutine is at work. The worker applies what is
	// queued, and returns false if the loop must do that. Who takes it out of turn owns the model
	// and the writer until it is put back. The loop puts it there first.
	turn chan func() bool

	enqueued func() // called for each change
	// metrics counts each change and measures when it was programmed.
	metrics *metrics.Sync
}

// newEventQueue returns an empty queue. It calls enqueued, unless it is nil, for each change.
func newEventQueue(enqueued func(), now func() time.Time) *eventQueue {
	if enqueued == nil {
		enqueued = func() {}
	}

	return &eventQueue{
		ready: make(chan struct{}, 1), turn: make(chan func() bool, 1), enqueued: enqueued, metrics: metrics.NewSync(now),
	}
}

// maxBatch is how many changes may wait for a flush.
const maxBatch = 100

// enqueue adds one change of the model and wakes the loop.
func (q *eventQueue) enqueue(change func(*model)) {
	q.add(change)
	q.wake()
}

// batch adds one change of the model, which the next flush applies.
func (q *eventQueue) batch(change func(*model)) {
	if q.add(change) == maxBatch {
		q.wake()
	}
}

// add returns how many changes wait now.
func (q *eventQueue) add(change func(*model)) int {
	q.mu.Lock()
	q.events = append(q.events, change)
	waiting := len(q.events)
	q.mu.Unlock()
	q.enqueued()

	return waiting
}

// wake makes ready readable.
func (q *eventQueue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// flush applies the batched changes in the calling goroutine if no other one is at work:
// waking another goroutine costs as much as most changes do.
func (q *eventQueue) flush() {
	q.mu.Lock()
	idle := len(q.events) == 0
	q.mu.Unlock()
	if idle {
		return
	}
	select {
	case work := <-q.turn:
		done := work()
		q.turn <- work
		if !done {
			q.wake()
		}
	default:
		q.wake()
	}
}

// drain returns the changes since the last call, in order.
func (q *eventQueue) drain() []func(*model) {
	q.mu.Lock()
	defer q.mu.Unlock()
	events := q.events
	q.events = nil

	return events
}

// sink is the event queue as package kube sees it.
type sink struct{ *eventQueue }

var _ kube.Sink = sink{}

// SetService implements [kube.Sink].
func (s sink) SetService(svc lb.Service, problems []lb.Problem) {
	s.metrics.ServiceQueued(metrics.FamiliesOf(&svc))
	s.batch(func(m *model) {
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
	s.batch(func(m *model) {
		s.metrics.ServiceRead(metrics.Both, m.state.Service(name) != nil)
		m.state.DeleteService(name)
		m.claimsChanged = true
		m.report("Service "+name.String(), nil)
	})
}

// SetSlice implements [kube.Sink].
func (s sink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	s.metrics.SliceQueued(metrics.FamilyOf(slice.Family))
	s.batch(func(m *model) {
		known := m.state.Slice(slice.Name)
		m.state.SetSlice(slice.EndpointSlice)
		s.metrics.SliceRead(&slice.EndpointSlice, m.state.Slice(slice.Name) != known, slice.Triggered)
		m.report("EndpointSlice "+slice.Name.String(), problems)
	})
}

// DeleteSlice implements [kube.Sink].
func (s sink) DeleteSlice(name lb.SliceName) {
	s.metrics.SliceQueued(metrics.None)
	s.batch(func(m *model) {
		s.metrics.SliceGone(m.state.Slice(name))
		m.state.DeleteSlice(name)
		m.report("EndpointSlice "+name.String(), nil)
	})
}

// SetNode implements [kube.Sink].
func (s sink) SetNode(node kube.Node, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.batch(func(m *model) {
		known := m.node
		m.setNode(node)
		s.metrics.Read(metrics.Both, !reflect.DeepEqual(m.node, known))
		m.report("Node "+node.Name, problems)
	})
}

// SetServiceCIDRs implements [kube.Sink].
func (s sink) SetServiceCIDRs(prefixes []netip.Prefix, problems []lb.Problem) {
	s.metrics.Queued(metrics.Both)
	s.batch(func(m *model) {
		s.metrics.Read(metrics.Both, !slices.Equal(prefixes, m.serviceCIDRs))
		m.serviceCIDRs = prefixes
		m.serviceCIDRsChanged = true
		m.report("ServiceCIDRs", problems)
	})
}

// SetPod implements [kube.Sink].
func (s sink) SetPod(pod kube.Pod, problems []lb.Problem) {
	s.batch(func(m *model) {
		m.optOuts.SetPod(pod)
		m.report("Pod "+pod.Namespace+"/"+pod.Name, problems)
	})
}

// SetNamespace implements [kube.Sink].
func (s sink) SetNamespace(namespace kube.Namespace, problems []lb.Problem) {
	s.batch(func(m *model) {
		m.optOuts.SetNamespace(namespace)
		m.report("Namespace "+namespace.Name, problems)
	})
}

// Report implements [kube.Sink].
func (s sink) Report(source string, problems []lb.Problem) {
	s.enqueue(func(m *model) { m.report(source, problems) })
}

// Flush implements [kube.Sink].
func (s sink) Flush() { s.flush() }
