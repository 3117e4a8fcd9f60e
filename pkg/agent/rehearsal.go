package agent

import (
	"time"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Rehearsal is what of an agent decides what is in the maps, without all that
// needs a kernel or an API server: whoever tests it says what there is, and
// when it is worked off. One goroutine at a time may use it.
type Rehearsal struct{ agent *agent }

// NewRehearsal returns an agent that writes with writer, whose clock is now. Of cfg it needs what is
// about Services, and a Log.
func NewRehearsal(cfg Config, writer *reconcile.Reconciler, now func() time.Time) *Rehearsal {
	a := &agent{cfg: cfg, writer: writer, now: now, model: newModel(cfg), mail: newMailbox()}
	// Nobody runs these: they note what they would have to do.
	a.keeper = newKeeper(a)
	a.flows = &flowKeeper{stale: make(chan struct{}, 1)}

	return &Rehearsal{a}
}

// Sink takes what the cluster says.
func (r *Rehearsal) Sink() kube.Sink { return sink{r.agent.mail} }

// SetAddresses says which addresses this node has.
func (r *Rehearsal) SetAddresses(addrs []node.Address) {
	r.agent.mail.post(func(m *model) { m.setLocalAddrs(addrs) })
}

// Work takes in what was told since the last call, and programs what follows
// from it; what fails, and what waits for a grace period, is the writer's. At the first call all that
// there is must have been told.
func (r *Rehearsal) Work() {
	if r.agent.synced {
		r.agent.readMail()
		r.agent.applyAll()

		return
	}
	r.agent.mail.post((*model).stopWaiting) // for more of the Node
	r.agent.readMail()
	r.agent.takeOver()
}

// Resolve returns what follows from a Service, or false if there is none of that
// name.
func (r *Rehearsal) Resolve(name lb.ServiceName) (lb.Resolution, bool) {
	return r.agent.model.state.Resolve(name)
}
