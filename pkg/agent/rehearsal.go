package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// TestHarness is the part of an agent that decides what is in the maps, without what needs a
// kernel or an API server. A test supplies the objects and decides when changes are applied.
// One goroutine at a time may use it.
type TestHarness struct{ agent *agent }

// NewTestHarness returns an agent that writes with writer, whose clock is now. Of cfg it
// uses the fields about Services, and Log.
func NewTestHarness(cfg Config, writer *reconcile.Reconciler, now func() time.Time) *TestHarness {
	a := &agent{cfg: cfg, writer: writer, now: now, model: newModel(cfg), queue: newEventQueue()}
	// These have no goroutine: requests to them are kept and not served.
	a.hooks = newHookMonitor(a)
	a.flows = &flowMonitor{stale: make(chan struct{}, 1)}

	return &TestHarness{a}
}

// Sink receives the objects of the cluster.
func (r *TestHarness) Sink() kube.Sink { return sink{r.agent.queue} }

// SetAddresses sets the addresses of this node.
func (r *TestHarness) SetAddresses(addrs []node.Address) {
	r.agent.queue.enqueue(func(m *model) { m.setLocalAddrs(addrs) })
}

// Work applies the changes since the last call, and programs what follows from them. Failed
// writes, and those that wait for a grace period, stay due in the writer. Before the first
// call, the sink must have received all objects.
func (r *TestHarness) Work() {
	if r.agent.synced {
		r.agent.processQueue()
		r.agent.applyAll()

		return
	}
	r.agent.queue.enqueue((*model).stopWaiting) // the Node is complete
	r.agent.processQueue()
	r.agent.takeOver()
}

// Resolve returns the resolution of a Service, or false if there is none of that name.
func (r *TestHarness) Resolve(name lb.ServiceName) (lb.Resolution, bool) {
	return r.agent.model.state.Resolve(name)
}
