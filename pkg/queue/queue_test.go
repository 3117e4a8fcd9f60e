package queue

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"
)

// Changes of each goroutine are applied in their order.
func TestOrder(t *testing.T) {
	box := New[int](nil)
	var got [4][]int
	var senders sync.WaitGroup
	for sender := range got {
		senders.Go(func() {
			for i := range 1000 {
				box.Enqueue(func(int) { got[sender] = append(got[sender], i) })
			}
		})
	}
	go func() { senders.Wait(); close(box.ready) }()
	for range box.Ready() {
		box.Apply(0)
	}
	box.Apply(0)
	for sender, numbers := range got {
		if len(numbers) != 1000 {
			t.Fatalf("sender %d: %d changes arrived, want 1000", sender, len(numbers))
		}
		for i, n := range numbers {
			if i != n {
				t.Fatalf("sender %d: change %d arrived as number %d", sender, n, i)
			}
		}
	}
}

// A batch does not grow without end while there is more to read.
func TestLargeBatchNeedsNoFlush(t *testing.T) {
	q := New[int](nil)
	for n := range maxBatch {
		if len(q.Ready()) > 0 {
			t.Errorf("the loop is woken for %d changes", n)
		}
		q.Batch(func(int) {})
	}
	if len(q.Ready()) == 0 {
		t.Errorf("the loop is not woken for %d changes", maxBatch)
	}
}

// A flush applies changes itself, unless another goroutine is at work or the worker leaves them to the loop.
func TestFlush(t *testing.T) {
	q := New[*int](nil)
	state, done := 0, true
	stop := q.Serve(func() bool {
		if done {
			q.Apply(&state)
		}

		return done
	})
	defer stop()
	change := func(n *int) { *n++ }
	for step, want := range []struct{ applied, woken bool }{{true, false}, {false, true}, {false, true}} {
		state = 0
		q.Batch(change)
		switch step {
		case 1:
			_ = q.InTurn(func() error { q.Flush(); return nil })
		case 2:
			done = false
			q.Flush()
		default:
			q.Flush()
		}
		woken := len(q.Ready()) > 0
		if (state > 0) != want.applied || woken != want.woken {
			t.Errorf("step %d: applied %d changes, woken: %t", step, state, woken)
		}
		if woken {
			<-q.Ready()
			q.Apply(&state)
		}
	}
}

// What takes long is collected in many turns, between which others have theirs; it bears that the map changes meanwhile.
func TestCollectInTurns(t *testing.T) {
	q := New[map[int]bool](nil)
	all := make(map[int]bool)
	for i := range 1000 {
		all[i] = true
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	turns := 0
	go func() {
		for ctx.Err() == nil {
			select {
			case <-q.Ready():
				q.Apply(all)
				turns++
				delete(all, 1000+turns) // another change
				all[1001+turns] = true
			case <-ctx.Done():
			}
		}
	}()
	seen := make(map[int]bool)
	err := Collect(t.Context(), q, func(yield func(int) bool) {
		for i := range all {
			time.Sleep(20 * time.Microsecond) // so long that all take 20 turns at least
			if !yield(i) {
				return
			}
		}
	}, func(i int) { seen[i] = true })
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		if !seen[i] {
			t.Fatalf("%d is missing", i)
		}
	}
	taken, _ := Ask(t.Context(), q, func() int { return turns })
	if taken < 20 {
		t.Errorf("it took %d turns", taken)
	}

	// One who does not wait any longer leaves nothing behind.
	gone, cancel := context.WithCancel(t.Context())
	ended := false
	err = Collect(gone, q, func(yield func(int) bool) {
		defer func() { ended = true }()
		for yield(0) {
			cancel()
		}
	}, func(int) {})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v", err)
	}
	if is, err := Ask(t.Context(), q, func() bool { return ended }); err != nil || !is {
		t.Errorf("it has not ended: %v", err)
	}
}
