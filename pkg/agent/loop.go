package agent

import (
	"context"
	stdmaps "maps"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// probeService owns the frontend that [datapath.Verify] dials. No Service of
// the cluster can have its name: a namespace has no dot.
var probeService = lb.ServiceName{Namespace: "sluice.internal", Name: "probe"}

// probeFrontend refuses whoever dials it.
func probeFrontend() lb.Frontend {
	return lb.Frontend{
		Key: lb.FrontendKey{
			Addr: datapath.ProbeAddr.Addr(), Port: datapath.ProbeAddr.Port(),
			Protocol: lb.TCP, Scope: lb.Internal,
		},
		Kind: lb.KindClusterIP,
		Port: lb.PortName{Service: probeService, Protocol: lb.TCP},

		Algorithm: lb.Random,
	}
}

// nodeWait is how long, once all Services are known, the first programming waits for
// the Node object, and node ports for its addresses. kube-proxy waits as long.
const nodeWait = 30 * time.Second

// restTime is how long after all is programmed what belongs to a start is over: the
// programs of devices are loaded, and what was retired is gone.
const restTime = 2 * time.Second

// loop works off whatever happens, in turn with goroutines that bring a change and work it
// off themselves ([mailbox.flush]).
func (a *agent) loop(ctx context.Context) error {
	drift := time.NewTicker(orDefault(a.cfg.DriftInterval, 10*time.Minute))
	defer drift.Stop()
	due := time.NewTimer(0)
	defer due.Stop()
	stock := time.NewTicker(stockInterval)
	defer stock.Stop()
	retired := time.NewTimer(0)
	defer retired.Stop()
	a.proxy.Started()
	services, self := a.source.Synced(), a.source.NodeSynced()
	var nodeTimeout <-chan time.Time

	round := func() {
		a.proxy.Taken()
		a.readMail()
		a.settle()
		if rest := a.beginGrace(ctx); rest > 0 {
			retired.Reset(rest)
		}
		if at, ok := a.writer.Next(); ok {
			due.Reset(time.Until(at))
		}
	}
	a.mail.workBy(func() bool {
		if !a.turn.TryLock() {
			return false
		}
		defer a.turn.Unlock()
		if a.synced {
			round()
		}

		return a.synced
	})
	defer a.turn.Lock() // for good: nothing is programmed any more

	for {
		var act func() error
		select {
		case <-ctx.Done():
			return nil
		case <-a.mail.ready:
		case <-a.loaded:
			a.loaded, act = nil, a.attachFirst
		case <-services:
			services, nodeTimeout = nil, time.After(nodeWait)
		case <-self:
			self = nil
			a.mail.post((*model).nodeTold)
		case <-nodeTimeout:
			self = nil
			a.mail.post((*model).stopWaiting)
		case <-due.C:
			act = a.retry
		case <-drift.C:
			act = a.compare
		case <-stock.C:
			act = func() error { a.takeStock(); return nil }
		case <-retired.C: // a grace period may begin
		case <-a.again:
			act = a.attach
		}
		known := services == nil && self == nil
		if err := a.inTurn(act, round, known); err != nil {
			return err
		}
	}
}

// inTurn does what is to be done, if act is not nil, and a round. Once all is known there is
// a first synchronization.
func (a *agent) inTurn(act func() error, round func(), known bool) error {
	a.turn.Lock()
	defer a.turn.Unlock()
	if act != nil {
		if err := act(); err != nil {
			return err
		}
	}
	round()
	if !known || a.synced || a.model.localAddrs == nil {
		return nil
	}
	if err := a.sync(); err != nil {
		return err
	}
	round()

	return nil
}

// retry writes what is due.
func (a *agent) retry() error {
	a.proxy.Taken()
	a.measure(metrics.Round{Retry: true}, a.apply)

	return nil
}

// busy reports whether the writer has something to write now: it writes slice by slice, so
// that what happens meanwhile need not wait for all of it.
func (a *agent) busy() bool {
	now := time.Now
	if a.now != nil {
		now = a.now
	}
	at, ok := a.writer.Next()

	return ok && !at.After(now())
}

// readMail takes in what happened, and programs what follows from it.
func (a *agent) readMail() {
	for _, change := range a.mail.take() {
		change(a.model)
	}
	if a.synced {
		a.measure(metrics.Round{}, a.program)
	} else {
		a.programNode()
	}
}

// sync is for the moment at which everything is known: only now can we tell
// what an earlier agent programmed and no Service has any more.
func (a *agent) sync() error {
	if err := a.checkNode(); err != nil {
		return err
	}
	begin := time.Now()
	collectBySize(startGC)
	a.measure(metrics.Round{Full: true}, a.takeOver)
	a.heavy = &heavyWork{} // not before: what is known at the start is programmed at the start
	a.keeper.endOrphans()  // of an agent that was killed before it could
	a.flows.endStale()
	err := a.attachSynced()
	a.cfg.Log.Info("synced", "services", a.model.state.Len(), "took", time.Since(begin))
	collectBySize(usualGC)
	time.AfterFunc(restTime, func() { giveBack(a.cfg.Log) })

	return err
}

// takeOver programs all that is known, and retires what no Service has any more. In maps that
// were empty, frontends are missing until it is done: then sync has sockets and flows ended
// that lead to nothing.
func (a *agent) takeOver() {
	a.synced = true
	a.program()
	a.applyAll()
	a.programServiceCIDRs()
	a.writer.Prune(slices.Collect(stdmaps.Keys(a.model.undecided))...)
	a.applyAll()
	a.complete = true
}

// applyAll writes all that is due.
func (a *agent) applyAll() {
	for a.apply(); a.busy(); {
		a.apply()
	}
}

// decidedAtOnce is about how many Services there are decisions at a time: all that follows
// from a Service is larger than what is known of it, and than what is kept when it is written.
const decidedAtOnce = 1000

// program brings the maps up to the model. What is known at the start is written at the start.
func (a *agent) program() {
	touched := a.model.state.Touched()
	if !a.complete {
		a.reserveFor(touched)
	}
	for names := range slices.Chunk(touched, decidedAtOnce) {
		room := a.writer.Room().Plus(a.decideOn(names))
		if !a.complete {
			a.reserve(room)
			a.applyAll()
			collectBySize(startGC)
		}
	}
	a.startHeavy()
	if !a.programNode() && len(touched) > 0 {
		a.apply()
	}
	a.programServiceCIDRs()
}

// decideOn has the writer follow what is decided about Services, and returns how much room
// that takes. Heavy Services are decided later.
func (a *agent) decideOn(names []lb.ServiceName) (room maps.Room) {
	var changed []lb.Snapshot
	for _, name := range names {
		s, exists := a.model.state.Snapshot(name)
		if exists && a.heavy != nil && s.Size() >= heavySize {
			a.heavy.add(name)

			continue
		}
		a.heavy.forget(name)
		if exists {
			changed = append(changed, s)
		} else {
			a.retire(name)
		}
	}
	decisions := a.decideAll(changed)
	for i, s := range changed {
		room = room.Plus(decisions[i].planned.Room())
		a.enforce(s.Service, decisions[i])
	}

	return room
}

// programServiceCIDRs programs changed ServiceCIDRs once all else is written: a client that
// dials an address in them that has no frontend is dropped.
func (a *agent) programServiceCIDRs() {
	if !a.model.serviceCIDRsChanged || a.busy() {
		return
	}
	a.model.serviceCIDRsChanged = false
	a.writer.SetServiceCIDRs(a.model.serviceCIDRs)
	a.apply()
}

// programNode brings the maps up to what is known of the node: its addresses, its
// devices, and from where its pods come. That needs no API server. It applies
// everything if anything changed, and reports whether it did.
func (a *agent) programNode() bool {
	changed := false
	if addrs, ok := a.model.newNodeAddrs(); ok {
		a.writer.SetNodeAddrs(addrs)
		if !a.model.awaitsPrimary() {
			a.model.checks.addrs = a.model.checkAddrs()
		}
		changed = true
	}
	if cidrs, ok := a.model.newLocalCIDRs(); ok {
		a.writer.SetLocalCIDRs(cidrs)
		changed = true
	}
	decisions, redecided := a.model.newDecisions()
	if redecided {
		a.decideForwarding()
		a.writer.SetDevices(deviceEntries(decisions, *a.throughStack == ""))
		changed = true
	}
	if changed {
		a.apply()
	}
	if redecided {
		a.devices.set(decisions)
	}

	return changed
}

// apply writes what is due, and ends the UDP sockets of backends that went.
func (a *agent) apply() {
	a.slices++
	if err := a.writer.Apply(); err != nil {
		a.cfg.Log.Error("not everything is programmed", "error", err)
		a.failing, a.unwritten, a.stock.stale = true, true, true
	}
	a.written.Store(a.writer.Written())
	if gone := a.writer.Gone(); a.complete && len(gone.Backends)+len(gone.Frontends) > 0 {
		a.keeper.endOrphans()
		a.flows.endStale()
	}
}

// pruneAddrs has addresses forgotten that no Service has any more and no flow has
// dialled. Anybody may call it.
func (a *agent) pruneAddrs(dialled flow.Dialled) {
	a.mail.post(func(*model) { a.writer.PruneAddrs(dialled.Addrs, dialled.Begin) }) // then the writer is due
}

// compare has everything in the maps compared with what should be there.
func (a *agent) compare() error {
	a.proxy.Taken()
	a.measure(metrics.Round{Full: true}, a.checkDrift)

	return nil
}

func (a *agent) checkDrift() {
	if !a.synced {
		return
	}
	drifted, err := a.writer.Drift(true)
	if err != nil {
		a.cfg.Log.Error("drift check", "error", err)
		a.unwritten = true
	}
	for _, d := range drifted {
		a.mail.metrics.Mended(d.Map)
		a.cfg.Log.Warn("a map was not as programmed; mended", "map", d.Map, "entry", d.Key, "problem", d.Problem)
	}
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}

	return d
}
