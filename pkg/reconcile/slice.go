package reconcile

import (
	"fmt"
	"iter"
	"runtime/debug"
)

// budget is what an Apply may still do, in units of which a map operation, some 2 µs, takes
// costOperation.
type budget struct{ left int }

const (
	costOperation = 64 // a system call
	costClaim     = 48 // entering or withdrawing a claim to a frontend
	costLook      = 8  // comparing something that may not need a write
	costSlot      = 1  // a store in memory
)

func (b *budget) spend(units int) { b.left -= units }

func (b *budget) spent() bool { return b.left <= 0 }

// worker does the work for one Service. It is a coroutine, so that the work can be written from top
// to bottom although it takes several slices: where the budget is spent, pay returns to Apply, and a
// later Apply continues there. No two workers run at a time.
type worker struct {
	svc    *service // nil: it has none
	do     func(*Reconciler, *service)
	resume func() // runs do until it ends or pauses
	pause  func()
	stop   func()    // ends the coroutine of a worker that has no Service
	failed *panicked // do has ended by a panic
}

func (r *Reconciler) newWorker() *worker {
	w := &worker{}
	next, stop := iter.Pull(func(yield func(struct{}) bool) {
		w.pause = func() { yield(struct{}{}) }
		do := func() { w.do(r, w.svc) }
		for {
			w.failed = guard(do)
			w.svc = nil
			if !yield(struct{}{}) {
				return
			}
		}
	})
	w.resume, w.stop = func() { next() }, stop

	return w
}

// run does the work for svc, or continues what a former slice has begun. It reports whether it has
// ended, and the panic if it did by one.
func (r *Reconciler) run(svc *service, do func(*Reconciler, *service)) (done bool, failed *panicked) {
	w := svc.worker
	if w == nil {
		if w = r.idle; w == nil {
			w = r.newWorker()
		}
		r.idle, w.svc, w.do = nil, svc, do
	}
	r.working = w
	w.resume()
	r.working = nil
	if w.svc != nil {
		svc.worker = w

		return false, nil
	}
	svc.worker = nil
	if failed = w.failed; r.idle == nil {
		r.idle = w
	} else {
		w.stop()
	}

	return true, failed
}

// pay spends units of the budget. If none are left the worker that calls it pauses before.
func (r *Reconciler) pay(units int) {
	if r.spent() {
		r.working.pause()
	}
	r.spend(units)
}

// panicked is a panic as an error.
type panicked struct {
	why   string
	stack []byte
}

func (p *panicked) Error() string {
	if p.stack == nil { // it was reported before
		return "panic again: " + p.why
	}

	return fmt.Sprintf("panic: %s\n%s", p.why, p.stack)
}

// guard calls do. It returns the panic in it, or nil.
func guard(do func()) (failed *panicked) {
	defer func() {
		if why := recover(); why != nil {
			failed = &panicked{fmt.Sprint(why), debug.Stack()}
		}
	}()
	do()

	return nil
}
