package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	stdmaps "maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/decision"
	"github.com/sluice-lb/sluice/pkg/events"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// parts are what an agent works with. A part that is not needed may be left out, except for
// queue, metrics and writer: a dry run has no kernel.
type parts struct {
	queue   *queue.Queue[*model] // any goroutine may add to it
	metrics *metrics.Sync
	source  source
	writer  *reconcile.Reconciler
	tables  maps.Tables // written by writer, read by any goroutine
	proxy   *health.Proxy
	checks  *health.Services

	// endStale starts the search for UDP sockets and flows whose backend or frontend is
	// gone, and does not wait for it.
	endStale func()
	// setDevices attaches programs to devices as decided, and does not wait for it.
	setDevices func([]node.Decision)
	// waitForPrograms returns when all programs have ended that run now.
	waitForPrograms func() error
	firstSync       chan struct{}       // closed by the first synchronization
	throughStack    string              // see [node.ModelConfig]
	hadNodePorts    map[netip.Addr]bool // see [node.ModelConfig]
	hadClientIPs    []netip.Addr        // see [node.ModelConfig]
	limits          lb.Limits           // of one Service
	events          events.Recorder
	resolve         decision.Resolver
}

// agent decides what is in the maps.
type agent struct {
	parts
	cfg     Config
	probe   []lb.Frontend // the agent's own, by which it tries its hooks
	known   atomic.Bool   // everything was programmed once; for any goroutine
	written atomic.Uint64 // changes when ids do; for any goroutine

	unprogrammed, roomless repeatedError

	// The goroutine that has the turn of queue owns all of the following.
	model    *model
	synced   bool // all Services and endpoints are known
	complete bool // and were programmed once
	drift    drift
	heavy    *decision.Heavy // nil: all Services are resolved in turn
	impaired status.Impaired // as last reported
	// reporting is set while a goroutine collects what is impaired now.
	reporting bool
	// graceBegun is when the last grace period began. What was taken out of the maps is used again only
	// after all programs have ended that may still use it.
	graceBegun time.Time

	newlyFailed bool  // a write has failed since impaired Services were reported
	failing     bool  // a write has failed since all changes were known to be in force
	unwritten   bool  // a write has failed in this round
	unwritable  error // why no map can be written
	slices      int   // that the writer has written
	// stackReason is why packets to backends on other nodes pass the network stack, "" if they
	// need not; nil if that is not decided yet.
	stackReason *string
}

// newAgent returns an agent that has received no object yet.
func newAgent(cfg Config, p parts) *agent {
	if p.checks == nil {
		p.checks = health.NewServices(health.ServicesConfig{})
	}
	if p.endStale == nil {
		p.endStale = func() {}
	}
	if p.setDevices == nil {
		p.setDevices = func([]node.Decision) {}
	}
	if p.resolve == nil {
		p.resolve = lb.Snapshot.ResolveIn
	}

	return &agent{parts: p, cfg: cfg, model: newModel(cfg, p)}
}

// nodeWait limits how long, once all Services are known, the first programming waits for
// the Node object, and node ports wait for its addresses. kube-proxy waits as long.
const nodeWait = 30 * time.Second

// restTime is how long after the first synchronization the start is over: the programs of
// devices are loaded, and retired slots are free.
const restTime = 2 * time.Second

// loop applies queued changes and timers until ctx ends. It takes turns with goroutines that
// apply the changes which they bring themselves ([queue.Queue.Flush]).
func (a *agent) loop(ctx context.Context) error {
	driftCheck := time.NewTicker(cmp.Or(a.cfg.DriftInterval, 10*time.Minute))
	defer driftCheck.Stop()
	due := time.NewTimer(0)
	defer due.Stop()
	impaired := time.NewTicker(impairedInterval)
	defer impaired.Stop()
	retired := time.NewTimer(0)
	defer retired.Stop()
	a.proxy.Started()
	a.tables.Heartbeat.Beat()
	services, self, pods := a.source.Synced(), a.source.NodeSynced(), a.source.PodsSynced()
	var nodeTimeout <-chan time.Time
	waited := false // long enough for the Node

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
	stop := a.queue.Serve(func() bool {
		if a.synced {
			round()
		}

		return a.synced
	})
	defer stop() // nothing is programmed after the loop has ended

	for {
		act := func() {}
		select {
		case <-ctx.Done():
			return nil
		case <-a.queue.Ready():
		case <-services:
			services, nodeTimeout = nil, time.After(nodeWait)
		case <-self:
			self = nil
			a.queue.Enqueue(func(m *model) { m.here.ObjectReceived() })
		case <-pods:
			pods = nil
			a.queue.Enqueue(func(m *model) { m.optOuts.Received() })
		case <-nodeTimeout:
			waited = true
			a.queue.Enqueue(func(m *model) { m.here.StopWaiting() })
		case <-due.C:
			act = a.retry
		case <-driftCheck.C:
			act = func() { a.compare(ctx) }
		case <-impaired.C:
			act = func() { a.reportImpaired(ctx) }
			a.tables.Heartbeat.Beat()
		case <-retired.C: // a grace period may begin
		}
		known := services == nil && (self == nil || waited)
		if err := a.queue.InTurn(func() error { return a.step(act, round, known) }); err != nil {
			return err
		}
	}
}

// step calls act and runs a round. Once everything is known, it runs the first
// synchronization.
func (a *agent) step(act, round func(), known bool) error {
	act()
	round()
	if !known || a.synced || !a.model.here.HasState() {
		return nil
	}
	if err := a.sync(); err != nil {
		return err
	}
	round()

	return nil
}

// retry writes what is due.
func (a *agent) retry() {
	a.proxy.Taken()
	a.measure(metrics.Round{Retry: true}, a.apply)
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
	a.heavy = &decision.Heavy{} // not before: all that is known at the start is programmed at the start
	a.endStale()                // of an agent that was killed before it could end them
	close(a.firstSync)
	a.cfg.Log.Info("synced", "services", a.model.state.Len(), "took", time.Since(begin))
	collectBySize(usualGC)
	time.AfterFunc(restTime, func() { debug.FreeOSMemory() })

	return nil
}

// takeOver programs all that is known, and retires what no Service has any more. In maps that
// were empty, frontends are missing until it is done. Only then does sync end the sockets and
// flows whose frontend or backend is gone.
func (a *agent) takeOver() {
	a.synced = true
	a.program()
	a.applyAll()
	a.programServiceCIDRs()
	keep := slices.Collect(stdmaps.Keys(a.model.undecided))
	a.writer.Prune(slices.AppendSeq(keep, stdmaps.Values(a.model.unread))...)
	a.applyAll()
	a.complete = true
}

// pruneAddrs removes the addresses that no Service has any more and that are no flow's
// original destination. Any goroutine may call it.
func pruneAddrs(queue *queue.Queue[*model], writer *reconcile.Reconciler, inUse flow.OriginalDsts) {
	queue.Enqueue(func(*model) { writer.PruneAddrs(inUse.Addrs, inUse.Begin) }) // the writer is due then
}

// drift is the state of the comparisons of the maps with what was written to them.
type drift struct {
	compares bool           // one is being made
	rests    time.Time      // none begins before
	over     *metrics.Round // of one that has ended in this turn
}

// driftRest is how many times as long as a comparison took the next one does not begin, so that they take less than a
// twentieth of a processor.
const driftRest = 19

// compare begins to compare the maps with what was written to them, and repairs them. It takes many short turns, between
// which changes have theirs: there may be millions of entries.
func (a *agent) compare(ctx context.Context) {
	if !a.synced || a.drift.compares || time.Now().Before(a.drift.rests) {
		return
	}
	a.proxy.Taken()
	a.drift.compares = true
	begin, comparison := time.Now(), a.writer.Compare(true)
	go func() {
		if err := queue.Collect(ctx, a.queue, comparison.Steps(), func(struct{}) {}); err != nil {
			return // the agent ends
		}
		a.queue.Enqueue(func(*model) { a.compared(comparison, begin) })
	}()
}

// compared reports what a comparison that began at a time has found. Its round is not over before the changes that came
// in the same turn are programmed.
func (a *agent) compared(c *reconcile.Comparison, begin time.Time) {
	a.drift = drift{
		rests: time.Now().Add(driftRest * time.Since(begin)),
		over:  &metrics.Round{Begin: begin, Full: true, Failed: len(c.Errs) > 0, Programmed: a.isProgrammed},
	}
	if len(c.Errs) > 0 {
		a.cfg.Log.Error("drift check", "error", errors.Join(c.Errs...))
	}
	for _, d := range c.Found {
		a.metrics.Mended(d.Map)
		a.cfg.Log.Warn("a map was not as programmed; mended", "map", d.Map, "entry", d.Key, "problem", d.Problem)
	}
}

// endComparison measures a comparison that has ended in this turn.
func (a *agent) endComparison() {
	r := a.drift.over
	if r == nil {
		return
	}
	a.drift.over = nil
	r.Failed = r.Failed || a.writer.Due()
	a.metrics.Done(*r)
}

// graceInterval is the least time from the start of one grace period to that of the next, so
// that endpoints which go one by one are retired together. The system call that waits for
// programs blocks a thread for as long as it takes, and costs as much as several changes.
const graceInterval = time.Second

// beginGrace starts a grace period if something was retired. If the last one started too
// recently, it returns how long to wait, else zero.
func (a *agent) beginGrace(ctx context.Context) time.Duration {
	if a.writer.InGrace() || !a.writer.Retired() {
		return 0
	}
	if rest := time.Until(a.graceBegun.Add(graceInterval)); rest > 0 {
		return rest
	}
	a.graceBegun = time.Now()
	a.writer.BeginGrace()
	go endGrace(ctx, a.waitForPrograms, a.cfg.Log, func() {
		a.queue.Enqueue(func(*model) { a.writer.EndGrace() })
	})

	return 0
}

// endGrace calls ended when all programs have ended, unless ctx ends before. The loop does not wait for it.
func endGrace(ctx context.Context, waitForPrograms func() error, log *slog.Logger, ended func()) {
	failed := false
	err := wait.PollUntilContextCancel(ctx, graceInterval, true, func(context.Context) (bool, error) {
		err := waitForPrograms()
		if err != nil && !failed {
			log.Error("what was taken out of the maps cannot be used again; trying again", "error", err)
			failed = true
		}

		return err == nil, nil
	})
	if err == nil {
		ended()
	}
}

// reportApplied reports to the health checks that the changes of this round are in force,
// unless no map can be written. If only writes of some Services fail, the node stays healthy,
// because the others work; [agent.reportImpaired] reports those Services. The node also stays
// healthy while a heavy Service is decided or written slice by slice, because other changes
// do not wait for it. It becomes unhealthy when the loop no longer reaches this call.
func (a *agent) reportApplied() {
	if !a.synced {
		return
	}
	a.known.Store(true)
	if a.failing {
		// If the probe's frontend is not in the map, hooks are not effective, which their monitor reports.
		if err := a.writer.TryWrite(a.probe[0].Key); err != nil {
			if a.unwritable == nil {
				a.cfg.Log.Error("nothing can be programmed; trying again", "error", err)
			}
			a.unwritable = err
			a.proxy.NotApplied()

			return
		}
		a.failing, a.unwritable = false, nil
	}
	busy := a.writer.Due()
	a.checks.Publish(func(name lb.ServiceName) bool { return !busy || a.writer.Programmed(name) })
	a.proxy.Applied()
}

// measure measures the writes of do as one round. Before the first synchronization it only
// calls do.
func (a *agent) measure(r metrics.Round, do func()) {
	r.Begin, a.unwritten = time.Now(), false
	do()
	if !a.synced {
		return
	}
	r.Failed, r.Programmed = a.unwritten || a.writer.Due(), a.isProgrammed
	a.metrics.Done(r)
}

// isProgrammed reports whether a Service is in the maps as it is known, or does not exist.
func (a *agent) isProgrammed(name lb.ServiceName) bool {
	_, undecided := a.model.undecided[name]

	return !undecided && !a.heavy.Has(name) && a.writer.Programmed(name)
}
