// Package decision decides what Services become on this node: it resolves each of them and plans its
// writes, those of many on all processors, and those of heavy ones in turn ([Heavy]). A panic about one
// Service is a decision about this one that has failed. Decisions change nothing.
package decision

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"

	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// Decision is what to program for a Service, or why that could not be decided.
type Decision struct {
	Resolution lb.Resolution
	Planned    reconcile.Planned
	Check      *health.Check
	Failed     string // the panic, "" if there was none
	Stack      []byte // of the panic
}

// Resolver resolves a Service: it is [lb.Snapshot.ResolveIn] unless a test has another one. Any goroutine
// may call its methods.
type Resolver func(lb.Snapshot, *lb.Memory) lb.Resolution

// Decide decides about one Service.
func (r Resolver) Decide(s lb.Snapshot) (d Decision) {
	failed, stack := guard(func() {
		resolve := func() lb.Resolution { return r(s, &lb.Memory{}) }
		d.Resolution = resolve()
		d.Planned = reconcile.PlanOf(d.Resolution, resolve)
		d.Check = health.CheckOf(s.Service, d.Resolution)
	})
	if failed != "" {
		return Decision{Failed: failed, Stack: stack}
	}

	return d
}

// DecideAll decides about many Services on all processors.
func (r Resolver) DecideAll(snapshots []lb.Snapshot) []Decision {
	decisions := make([]Decision, len(snapshots))
	workers := max(1, min(runtime.GOMAXPROCS(0), len(snapshots)))
	decide := func(first int) {
		for i := first; i < len(snapshots); i += workers {
			decisions[i] = r.Decide(snapshots[i])
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

// Resolve returns the resolution of a Service, an empty one if that panics.
func (r Resolver) Resolve(s lb.Snapshot, m *lb.Memory) (res lb.Resolution) {
	guard(func() { res = r(s, m) })

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
