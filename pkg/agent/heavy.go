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

// One Service may take limitShare of a map. Arrays grow with the cluster, so there is
// no capacity to share: maxEndpoints of one port are gone through in some milliseconds,
// which is the longest piece of work that the writer does not cut short.
const (
	limitShare   = 8
	maxEndpoints = 1 << 16
)

// limitsOf returns how much of these maps one Service may take.
func limitsOf(t maps.Tables) lb.Limits {
	return lb.Limits{
		Frontends:    capacityOf(t.FrontendIDs) / limitShare,
		SourceRanges: capacityOf(t.SourceRanges) / limitShare,
		Endpoints:    maxEndpoints,
	}
}

// capacityOf returns how many entries fit into a map, zero if it has no limit.
func capacityOf(table any) int {
	if sized, ok := table.(interface{ Capacity() int }); ok {
		return sized.Capacity()
	}

	return 0
}

// decision is what was decided about a Service: what follows from it, or why that is not
// known.
type decision struct {
	res     lb.Resolution
	planned reconcile.Planned
	check   *health.Check
	failed  string // by a panic; the stack of it
	stack   []byte
}

// decide resolves a Service and plans what to write. It changes nothing, and any goroutine
// may call it.
func (a *agent) decide(s lb.Snapshot) (d decision) {
	failed, stack := guard(func() {
		d.res = a.resolveService(s)
		d.planned = reconcile.PlanOf(d.res, func() lb.Resolution { return a.resolveService(s) })
		d.check = checkOf(s.Service, d.res)
	})
	if failed != "" {
		return decision{failed: failed, stack: stack}
	}

	return d
}

// decideAll decides about many Services on all processors.
func (a *agent) decideAll(snapshots []lb.Snapshot) []decision {
	decisions := make([]decision, len(snapshots))
	workers := min(runtime.GOMAXPROCS(0), len(snapshots))
	var all sync.WaitGroup
	for first := 1; first < workers; first++ {
		all.Go(func() { a.decideEach(snapshots, decisions, first, workers) })
	}
	a.decideEach(snapshots, decisions, 0, max(workers, 1))
	all.Wait()

	return decisions
}

func (a *agent) decideEach(snapshots []lb.Snapshot, to []decision, first, step int) {
	for i := first; i < len(snapshots); i += step {
		to[i] = a.decide(snapshots[i])
	}
}

// reserve makes room in the maps for what was decided.
func (a *agent) reserve(room maps.Room) {
	if err := a.writer.Reserve(room); err != nil {
		// The writer reports each Service whose writes fail for lack of room.
		a.cfg.Log.Warn("not all that was decided has room", "error", err)
	}
}

// reserveFor makes room for about all that follows from the Services that there are at the
// start: what grows bit by bit has more room than it needs in the end.
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

// resolved returns what follows from a Service, nothing if that is not known.
func (a *agent) resolved(s lb.Snapshot) (res lb.Resolution) {
	guard(func() { res = a.resolveService(s) })

	return res
}

func (a *agent) resolveService(s lb.Snapshot) lb.Resolution {
	if a.resolve != nil {
		return a.resolve(s)
	}

	return s.Resolve()
}

// guard does something for one Service. A panic is a mistake of ours that one object has
// brought to light: it is told, and all others go on.
func guard(do func()) (failed string, stack []byte) {
	defer func() {
		if why := recover(); why != nil {
			failed, stack = fmt.Sprintf("panic: %v", why), debug.Stack()
		}
	}()
	do()

	return "", nil
}

// enforce has the writer, and all who are to know, follow a decision. A Service about which
// nothing could be decided keeps what it has.
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
	a.mail.metrics.Resolved(name, d.res)
	a.model.report(source, d.res.Problems)
	a.model.checks.plan(name, d.check)
	a.writer.SetPlanned(name, svc.Created, d.planned)
}

// retire has the writer, and all who are to know, forget a Service.
func (a *agent) retire(name lb.ServiceName) {
	delete(a.model.undecided, name)
	a.mail.metrics.Resolved(name, lb.Resolution{})
	a.model.report(decisionsAbout(name), nil)
	a.model.checks.plan(name, nil)
	a.writer.Delete(name)
}

func decisionsAbout(name lb.ServiceName) string { return "decisions about Service " + name.String() }

// heavySize is the size ([lb.Snapshot.Size]) from which on a Service is decided beside the
// loop. Below, it takes the loop about two milliseconds.
const heavySize = 4000

// heavyWork decides about heavy Services beside the loop, which goes on with the others
// meanwhile. It is done by one goroutine, for one Service at a time, which is then the last
// in turn: heavy Services wait for each other, and leave a processor for all else.
type heavyWork struct {
	waiting []lb.ServiceName
	running *heavyJob
}

// heavyJob is a decision that is being made.
type heavyJob struct {
	name lb.ServiceName
	// again: the Service has changed since. What is decided still counts: a Service that
	// changes all the time would never be programmed otherwise.
	again bool
	// outdated: the Service is gone, or was decided in the loop since.
	outdated bool
}

// add has a Service decided, as it is when its turn comes.
func (h *heavyWork) add(name lb.ServiceName) {
	switch job := h.running; {
	case job != nil && job.name == name && !job.outdated:
		job.again = true
	case !slices.Contains(h.waiting, name):
		h.waiting = append(h.waiting, name)
	}
}

// forget has nothing decided about a Service any more.
func (h *heavyWork) forget(name lb.ServiceName) {
	if h == nil {
		return
	}
	if h.running != nil && h.running.name == name {
		h.running.outdated = true
	}
	h.waiting = slices.DeleteFunc(h.waiting, func(n lb.ServiceName) bool { return n == name })
}

// has reports whether a Service is to be decided.
func (h *heavyWork) has(name lb.ServiceName) bool {
	if h == nil {
		return false
	}

	return h.running != nil && h.running.name == name && !h.running.outdated || slices.Contains(h.waiting, name)
}

// startHeavy begins with the next heavy Service, unless there is one in work.
func (a *agent) startHeavy() {
	h := a.heavy
	if h == nil || h.running != nil || len(h.waiting) == 0 {
		return
	}
	job := &heavyJob{name: h.waiting[0]}
	h.waiting = h.waiting[1:]
	s, _ := a.model.state.Snapshot(job.name) // one that is gone is not waiting
	h.running = job
	used := a.writer.Room()
	go func() {
		d := a.decide(s)
		a.reserve(used.Plus(d.planned.Room()))
		a.mail.post(func(*model) {
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
