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

// probeFrontend has no backend, so that hooks refuse every connection to it.
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

// nodeWait limits how long, once all Services are known, the first programming waits for
// the Node object, and node ports wait for its addresses. kube-proxy waits as long.
const nodeWait = 30 * time.Second

// restTime is how long after the first synchronization the start is over: the programs of
// devices are loaded, and retired slots are free.
const restTime = 2 * time.Second

// loop applies queued changes and timers until ctx ends. It takes turns with goroutines that
// apply the changes which they bring themselves ([eventQueue.flush]).
func (a *agent) loop(ctx context.Context) error {
	drift := time.NewTicker(orDefault(a.cfg.DriftInterval, 10*time.Minute))
	defer drift.Stop()
	due := time.NewTimer(0)
	defer due.Stop()
	impaired := time.NewTicker(impairedInterval)
	defer impaired.Stop()
	retired := time.NewTimer(0)
	defer retired.Stop()
	a.proxy.Started()
	services, self := a.source.Synced(), a.source.NodeSynced()
	var nodeTimeout <-chan time.Time

	round := func() {
		a.proxy.Taken()
		a.processQueue()
		a.reportApplied()
		if rest := a.beginGrace(ctx); rest > 0 {
			retired.Reset(rest)
		}
		if at, ok := a.writer.Next(); ok {
			due.Reset(time.Until(at))
		}
	}
	a.queue.setWorker(func() bool {
		if !a.turn.TryLock() {
			return false
		}
		defer a.turn.Unlock()
		if a.synced {
			round()
		}

		return a.synced
	})
	defer a.turn.Lock() // never unlocked: nothing is programmed after the loop has ended

	for {
		var act func() error
		select {
		case <-ctx.Done():
			return nil
		case <-a.queue.ready:
		case <-a.loaded:
			a.loaded, act = nil, a.attachFirst
		case <-services:
			services, nodeTimeout = nil, time.After(nodeWait)
		case <-self:
			self = nil
			a.queue.enqueue((*model).nodeReceived)
		case <-nodeTimeout:
			self = nil
			a.queue.enqueue((*model).stopWaiting)
		case <-due.C:
			act = a.retry
		case <-drift.C:
			act = a.compare
		case <-impaired.C:
			act = func() error { a.reportImpaired(); return nil }
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

// inTurn calls act, unless it is nil, and runs a round. Once everything is known, it runs the
// first synchronization.
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

// busy reports whether the writer has something to write now. It writes slice by slice, so
// that a change need not wait until everything else is written.
func (a *agent) busy() bool {
	now := time.Now
	if a.now != nil {
		now = a.now
	}
	at, ok := a.writer.Next()

	return ok && !at.After(now())
}

// processQueue applies the queued changes to the model, and programs what follows from them.
func (a *agent) processQueue() {
	for _, change := range a.queue.drain() {
		change(a.model)
	}
	if a.synced {
		a.measure(metrics.Round{}, a.program)
	} else {
		a.programNode()
	}
}

// sync runs once, when everything is known: only now is it certain what an earlier agent
// programmed and no Service has any more.
func (a *agent) sync() error {
	if err := a.checkNode(); err != nil {
		return err
	}
	begin := time.Now()
	collectBySize(startGC)
	a.measure(metrics.Round{Full: true}, a.takeOver)
	a.heavy = &heavyWork{} // not before: all that is known at the start is programmed at the start
	a.hooks.endOrphans()   // those of an agent that was killed before it could end them
	a.flows.endStale()
	err := a.attachSynced()
	a.cfg.Log.Info("synced", "services", a.model.state.Len(), "took", time.Since(begin))
	collectBySize(usualGC)
	time.AfterFunc(restTime, func() { giveBack(a.cfg.Log) })

	return err
}

// takeOver programs all that is known, and retires what no Service has any more. In maps that
// were empty, frontends are missing until it is done. Only then does sync end the sockets and
// flows whose frontend or backend is gone.
func (a *agent) takeOver() {
	a.synced = true
	a.program()
	a.applyAll()
	a.programServiceCIDRs()
	a.writer.Prune(slices.Collect(stdmaps.Keys(a.model.undecided))...)
	a.applyAll()
	a.complete = true
}

// applyAll writes until nothing is due.
func (a *agent) applyAll() {
	for a.apply(); a.busy(); {
		a.apply()
	}
}

// decidedAtOnce is about how many decisions exist at a time: a decision takes more memory than
// the Service it is made from, and than what is kept once it is written.
const decidedAtOnce = 1000

// program updates the maps to the model. Until the first synchronization is complete, it
// writes each chunk of decisions before it makes the next one.
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

// decideOn decides about Services, hands the decisions to the writer, and returns how much
// room they take. Heavy Services are decided later.
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

// programServiceCIDRs programs changed ServiceCIDRs once all else is written, because packets
// to an address in them that has no frontend are dropped.
func (a *agent) programServiceCIDRs() {
	if !a.model.serviceCIDRsChanged || a.busy() {
		return
	}
	a.model.serviceCIDRsChanged = false
	a.writer.SetServiceCIDRs(a.model.serviceCIDRs)
	a.apply()
}

// programNode updates the maps to what is known of the node: its addresses, its devices, and
// the ranges of its pods. That needs no API server. If anything has changed, it writes all
// that is due and returns true.
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

// apply writes one slice of what is due. If backends or frontends have gone, it starts the
// search for their UDP sockets and flows.
func (a *agent) apply() {
	a.slices++
	if err := a.writer.Apply(); err != nil {
		a.cfg.Log.Error("not everything is programmed", "error", err)
		a.failing, a.unwritten, a.impaired.stale = true, true, true
	}
	a.written.Store(a.writer.Written())
	if gone := a.writer.Gone(); a.complete && len(gone.Backends)+len(gone.Frontends) > 0 {
		a.hooks.endOrphans()
		a.flows.endStale()
	}
}

// pruneAddrs removes the addresses that no Service has any more and that are no flow's
// original destination. Any goroutine may call it.
func (a *agent) pruneAddrs(inUse flow.OriginalDsts) {
	a.queue.enqueue(func(*model) { a.writer.PruneAddrs(inUse.Addrs, inUse.Begin) }) // the writer is due then
}

// compare compares the maps with the desired state and repairs them.
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
		a.queue.metrics.Mended(d.Map)
		a.cfg.Log.Warn("a map was not as programmed; mended", "map", d.Map, "entry", d.Key, "problem", d.Problem)
	}
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d == 0 {
		return otherwise
	}

	return d
}
