package flow

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Drain deletes all frontends at once, so that new connections pass, and waits for flows that are open: not for
// connections that have ended, nor for UDP that is idle.
func TestDrain(t *testing.T) {
	for _, test := range []struct {
		name    string
		proto   uint8
		state   uint8
		idle    time.Duration
		open    int
		removed bool // before the timeout
	}{
		{"an established connection", 6, maps.FlowOpen, time.Hour, 1, false},
		{"a connection that was reset", 6, maps.FlowReset, 0, 0, false},
		{"UDP in use", 17, maps.FlowOpen, time.Second, 1, false},
		{"idle UDP", 17, maps.FlowOpen, time.Minute, 0, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 256)
			w.clock = maps.Now()
			f := flowOf(test.proto, 1)
			if test.state == maps.FlowReset {
				f.Ending = maps.FlowOver
			}
			w.put(t, f, note{role: maps.FlowFromClient, state: test.state, idle: test.idle}, note{role: maps.FlowToClient, state: test.state, idle: test.idle})
			lab.Must(t, w.FrontendIDs.Put(maps.FrontendKeyOf(f.OriginalDst.IP(), 80, test.proto, maps.ScopeExternal), 7))
			var counts []int
			open, err := Drain(t.Context(), w.Pinned, 0, func(open []Flow) { counts = append(counts, len(open)) })
			lab.Must(t, err)
			if open != test.open || !slices.Equal(counts, []int{open, open}) {
				t.Errorf("%d are open, seen %v, want %d", open, counts, test.open)
			}
			for e, err := range w.FrontendIDs.All() {
				t.Errorf("a frontend is left: %v, %v", e, err)
			}
			if n := w.count(t, f); (n == 0) != test.removed {
				t.Errorf("the flow has %d entries, removed should be %t", n, test.removed)
			}
		})
	}
}

// It ends as soon as the last flow does, or when its context ends.
func TestDrainEnds(t *testing.T) {
	w := newWorld(t, 256)
	w.clock = maps.Now()
	f := flowOf(6, 1)
	w.put(t, f, note{role: maps.FlowFromClient, state: maps.FlowOpen}, note{role: maps.FlowToClient, state: maps.FlowOpen})
	ctx, cancel := context.WithCancel(t.Context())
	if open, err := Drain(ctx, w.Pinned, time.Hour, func([]Flow) { cancel() }); open != 1 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d are open, %v, after its context has ended", open, err)
	}
	open, err := Drain(t.Context(), w.Pinned, time.Hour, func(open []Flow) {
		if len(open) > 0 {
			f.Ending = maps.FlowOver
			w.put(t, f, note{role: maps.FlowFromClient, state: maps.FlowReset}, note{role: maps.FlowToClient, state: maps.FlowReset})
		}
	})
	if open != 0 || err != nil {
		t.Errorf("%d are open, %v, after the connection has ended", open, err)
	}
}
