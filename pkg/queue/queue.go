// Package queue has the changes of a state that any goroutine reports, until the goroutine applies them
// that has the turn. That is a loop or, because waking another goroutine costs as much as most
// changes do, the one that has reported them.
package queue

import (
	"context"
	"iter"
	"sync"
	"time"
)

// Queue has changes of an S. No method but [Queue.InTurn] and the end of [Queue.Serve] waits for the goroutine that
// has the turn.
type Queue[S any] struct {
	enqueued func()

	mu      sync.Mutex
	changes []func(S)
	ready   chan struct{}
	// turn has the worker in it while no goroutine is at work. The goroutine that takes it out of turn
	// owns the state until it puts it back.
	turn chan func() bool
}

// New returns an empty queue. It calls enqueued, unless it is nil, for each change.
func New[S any](enqueued func()) *Queue[S] {
	if enqueued == nil {
		enqueued = func() {}
	}

	return &Queue[S]{enqueued: enqueued, ready: make(chan struct{}, 1), turn: make(chan func() bool, 1)}
}

// maxBatch is how many changes may wait for a flush.
const maxBatch = 100

// Enqueue adds one change and wakes the loop.
func (q *Queue[S]) Enqueue(change func(S)) {
	q.add(change)
	q.wake()
}

// Batch adds one change, which the next flush applies.
func (q *Queue[S]) Batch(change func(S)) {
	if q.add(change) == maxBatch {
		q.wake()
	}
}

// add returns how many changes wait now.
func (q *Queue[S]) add(change func(S)) int {
	q.mu.Lock()
	q.changes = append(q.changes, change)
	waiting := len(q.changes)
	q.mu.Unlock()
	q.enqueued()

	return waiting
}

// Ready returns a channel that can be read once when the loop has to apply changes.
func (q *Queue[S]) Ready() <-chan struct{} { return q.ready }

func (q *Queue[S]) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// Flush applies the batched changes in the calling goroutine if no other one is at work.
func (q *Queue[S]) Flush() {
	q.mu.Lock()
	idle := len(q.changes) == 0
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

// Apply applies the changes since the last call, in order. The caller has the turn.
func (q *Queue[S]) Apply(state S) {
	q.mu.Lock()
	changes := q.changes
	q.changes = nil
	q.mu.Unlock()
	for _, change := range changes {
		change(state)
	}
}

// Serve lets goroutines take turns from now until stop is called, which waits for the one that has the
// turn. A flush calls work, which applies the changes, or returns false if the loop must do that.
func (q *Queue[S]) Serve(work func() bool) (stop func()) {
	q.turn <- work

	return func() { <-q.turn }
}

// InTurn waits for the turn, calls do, and returns its error.
func (q *Queue[S]) InTurn(do func() error) error {
	work := <-q.turn
	defer func() { q.turn <- work }()

	return do()
}

// Ask calls compute in the goroutine that has the turn, and returns its result, or the error of ctx
// if that ends before.
func Ask[S, T any](ctx context.Context, q *Queue[S], compute func() T) (T, error) {
	done := make(chan T, 1)
	q.Enqueue(func(S) { done <- compute() })
	select {
	case <-ctx.Done():
		var none T

		return none, ctx.Err()
	case value := <-done:
		return value, nil
	}
}

// turnLimit is how long a step of [Collect] may take, after which others have their turn.
const turnLimit = time.Millisecond

// Collect calls each with what seq yields, in the goroutine that has the turn: for a millisecond at most, again and again.
// So seq must bear that the state changes between two of its values. It returns the error of ctx if that ends before.
func Collect[S, T any](ctx context.Context, q *Queue[S], seq iter.Seq[T], each func(T)) error {
	next, stop := iter.Pull(seq)
	step := func() (more bool) {
		for end := time.Now().Add(turnLimit); time.Now().Before(end); {
			value, ok := next()
			if !ok {
				return false
			}
			each(value)
		}

		return true
	}
	for {
		more, err := Ask(ctx, q, step)
		if err != nil {
			q.Enqueue(func(S) { stop() }) // behind the step that may still wait

			return err
		}
		if !more {
			return nil
		}
	}
}
