package agent

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

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
	here := a.model.here
	if addrs, ok := here.NewAddrs(); ok {
		a.writer.SetNodeAddrs(addrs)
		if checked, known := here.CheckAddrs(); known {
			a.checks.PlanAddresses(checked)
		}
		changed = true
	}
	if cidrs, ok := here.NewLocalCIDRs(); ok {
		a.writer.SetLocalCIDRs(cidrs)
		changed = true
	}
	if uids, ok := a.model.optOuts.Changed(); ok {
		a.writer.SetOptedOut(uids)
		changed = true
	}
	decisions, devices, redecided := here.NewDecisions()
	if redecided {
		why := here.ThroughStack()
		if a.stackReason == nil || *a.stackReason != why {
			a.cfg.Log.Info("forwarding to backends on other nodes", "stack", why != "", "because", why)
		}
		a.stackReason = &why
		a.writer.SetDevices(devices)
		changed = true
	}
	if changed {
		a.apply()
	}
	if redecided {
		a.setDevices(decisions)
	}

	return changed
}

// apply writes one slice of what is due. If backends or frontends have gone, it starts the
// search for their UDP sockets and flows.
func (a *agent) apply() {
	a.slices++
	if err := a.writer.Apply(); err != nil {
		a.cfg.Log.Error("not everything is programmed", "error", err)
		a.failing, a.unwritten, a.newlyFailed = true, true, true
	}
	a.written.Store(a.writer.Written())
	if gone := a.writer.Gone(); a.complete && len(gone.Backends)+len(gone.Frontends) > 0 {
		a.endStale()
	}
}

// applyAll writes until nothing is due.
func (a *agent) applyAll() {
	for a.apply(); a.busy(); {
		a.apply()
	}
}

// decision is the outcome of resolving a Service: what to program, or why that failed.
type decision struct {
	res     lb.Resolution
	planned reconcile.Planned
	check   *health.Check
	failed  string // the panic, "" if there was none
	stack   []byte
}

// decide resolves a Service and plans its writes. It changes nothing, and any goroutine
// may call it.
func (a *agent) decide(s lb.Snapshot) (d decision) {
	failed, stack := guard(func() {
		d.res = a.resolve(s)
		d.planned = reconcile.PlanOf(d.res, func() lb.Resolution { return a.resolve(s) })
		d.check = health.CheckOf(s.Service, d.res)
	})
	if failed != "" {
		return decision{failed: failed, stack: stack}
	}

	return d
}

// decideAll decides about many Services on all processors.
func (a *agent) decideAll(snapshots []lb.Snapshot) []decision {
	decisions := make([]decision, len(snapshots))
	workers := max(1, min(runtime.GOMAXPROCS(0), len(snapshots)))
	decide := func(first int) {
		for i := first; i < len(snapshots); i += workers {
			decisions[i] = a.decide(snapshots[i])
		}
	}
	var others sync.WaitGroup
	for first := 1; first < workers; first++ {
		others.Go(func() { decide(first) })
	}
	decide(0)
	others.Wait()

	return decisions
}

// reserve makes room in the maps for decisions.
func (a *agent) reserve(room maps.Room) {
	if err := a.writer.Reserve(room); err != nil {
		// The writer reports each Service whose writes fail for lack of room.
		a.cfg.Log.Warn("the maps have no room for all Services", "error", err)
	}
}

// reserveFor makes room for about all that the Services of the start need. An array that
// grows in many steps would end up larger than needed.
func (a *agent) reserveFor(names []lb.ServiceName) {
	frontends, ports, endpoints := 1, 1, 1
	for _, name := range names {
		if s, exists := a.model.state.Snapshot(name); exists && len(s.Service.ClusterIPs) > 0 {
			frontends += s.Frontends()
			ports += len(s.Service.Ports) + 1
			endpoints += s.Endpoints()
		}
	}
	a.reserve(maps.Room{Frontends: frontends, Pools: ports, Slots: endpoints, Backends: endpoints, ServicePorts: ports})
}

// resolved returns the resolution of a Service, an empty one if that panics.
func (a *agent) resolved(s lb.Snapshot) (res lb.Resolution) {
	guard(func() { res = a.resolve(s) })

	return res
}

// guard calls do, which is about one Service, and recovers from a panic. A panic is a bug
// that this object has triggered: it is returned, and other Services are not affected.
func guard(do func()) (failed string, stack []byte) {
	defer func() {
		if why := recover(); why != nil {
			failed, stack = fmt.Sprintf("panic: %v", why), debug.Stack()
		}
	}()
	do()

	return "", nil
}

// enforce hands a decision to the writer, the health checks and the metrics. A Service whose
// decision failed keeps what it has.
func (a *agent) enforce(svc *lb.Service, d decision) {
	name, source := svc.Name, decisionsAbout(svc.Name)
	if d.failed != "" {
		failure := lb.Problem{
			Object:  "Service " + name.String(),
			Message: "internal error, so it stays as it was: " + d.failed,
		}
		if !slices.Contains(a.model.problems[source], failure) {
			a.cfg.Log.Error("a Service could not be decided", "service", name, "error", d.failed, "stack", string(d.stack))
		}
		a.model.report(source, []lb.Problem{failure})
		a.model.undecided[name] = struct{}{}

		return
	}
	delete(a.model.undecided, name)
	a.queue.metrics.Resolved(name, d.res)
	a.model.report(source, d.res.Problems)
	a.checks.Plan(name, d.check)
	a.writer.SetPlanned(name, svc.Created, d.planned)
}

// retire removes a Service from the writer, the health checks and the metrics.
func (a *agent) retire(name lb.ServiceName) {
	delete(a.model.undecided, name)
	a.queue.metrics.Resolved(name, lb.Resolution{})
	a.model.report(decisionsAbout(name), nil)
	a.checks.Plan(name, nil)
	a.writer.Delete(name)
}

func decisionsAbout(name lb.ServiceName) string { return "decisions about Service " + name.String() }

// heavySize is the size ([lb.Snapshot.Size]) from which on a Service is decided beside the
// loop. Below, it takes the loop about two milliseconds.
const heavySize = 4000

// heavyWork decides about heavy Services in a goroutine of its own, while the loop goes on
// with the others. It handles one Service at a time, in the order in which they changed, so
// that heavy Services wait for each other and leave a processor for everything else.
type heavyWork struct {
	waiting []lb.ServiceName
	running *heavyJob
}

// heavyJob is a decision in progress.
type heavyJob struct {
	name lb.ServiceName
	// again is set if the Service has changed since. This decision still counts, because
	// a Service that changes all the time would never be programmed otherwise.
	again bool
	// outdated is set if the Service is gone, or was decided in the loop since.
	outdated bool
}

// add queues a Service, which is decided as it is when its turn comes.
func (h *heavyWork) add(name lb.ServiceName) {
	switch job := h.running; {
	case job != nil && job.name == name && !job.outdated:
		job.again = true
	case !slices.Contains(h.waiting, name):
		h.waiting = append(h.waiting, name)
	}
}

// forget drops a Service from the queue, and the decision about it that is in progress.
func (h *heavyWork) forget(name lb.ServiceName) {
	if h == nil {
		return
	}
	if h.running != nil && h.running.name == name {
		h.running.outdated = true
	}
	h.waiting = slices.DeleteFunc(h.waiting, func(n lb.ServiceName) bool { return n == name })
}

// has reports whether a Service waits for its decision.
func (h *heavyWork) has(name lb.ServiceName) bool {
	if h == nil {
		return false
	}

	return h.running != nil && h.running.name == name && !h.running.outdated || slices.Contains(h.waiting, name)
}

// startHeavy starts the decision about the next heavy Service, unless one is in progress.
func (a *agent) startHeavy() {
	h := a.heavy
	if h == nil || h.running != nil || len(h.waiting) == 0 {
		return
	}
	job := &heavyJob{name: h.waiting[0]}
	h.waiting = h.waiting[1:]
	s, _ := a.model.state.Snapshot(job.name) // it exists: a Service that goes leaves waiting
	h.running = job
	used := a.writer.Room()
	go func() {
		d := a.decide(s)
		a.reserve(used.Plus(d.planned.Room()))
		a.queue.enqueue(func(*model) {
			h.running = nil
			if job.outdated {
				return
			}
			a.enforce(s.Service, d)
			if job.again {
				h.add(job.name)
			}
		})
	}()
}
