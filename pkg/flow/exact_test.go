package flow

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// made is a flow that was put, and with what.
type made struct {
	flow  maps.Flow
	notes []note
}

// mustMake fills tables at random. Some flows share a client and what it dialled
// with one to another backend, some have lost entries, some are on the move, and
// some were half told when their first entry was put.
func mustMake(t *testing.T, w *world, r *rand.Rand, n int) []made {
	t.Helper()
	var all []made
	ages := []time.Duration{0, time.Second, 8 * time.Second, 10*time.Second + 1, 12 * time.Second, 25 * time.Second,
		30*time.Second + 1, 40 * time.Second, 100 * time.Second, 120*time.Second + 1, 125 * time.Second, 50 * time.Minute, 2 * time.Hour, 23 * time.Hour, 25 * time.Hour}
	for i := range n {
		f := flowOf([]uint8{tcp, udp, sctp}[r.IntN(3)], i+1)
		if i > 0 && r.IntN(6) == 0 {
			f = told(all[i-1].flow)
			f.Backend, f.BackendId = addr(fmt.Sprintf("10.244.%d.%d", i>>8, i&255)), uint32(i+100)
		}
		if r.IntN(3) == 0 {
			f = masqueraded(f)
			f.Flags |= []uint8{0, maps.FlowTurned}[r.IntN(2)]
		}
		m := made{flow: f}
		halfOpen := r.IntN(3) == 0
		for _, role := range f.Roles() {
			if r.IntN(8) == 0 {
				continue // pushed out
			}
			m.notes = append(m.notes, note{
				role: role, state: uint8(r.IntN(4)), halfOpen: halfOpen != (r.IntN(20) == 0), idle: ages[r.IntN(len(ages))],
			})
		}
		all = append(all, m)
	}
	for i, m := range all {
		shared := i+1 < n && m.flow.Key(fromClient) == all[i+1].flow.Key(fromClient)
		m.put(t, w, !shared && r.IntN(2) == 0)
	}

	return all
}

// told is what is told of f before it is masqueraded.
func told(f maps.Flow) maps.Flow {
	f.Flags, f.Masquerade, f.MasqueradePort = 0, maps.Addr{}, 0

	return f
}

// put puts what is to be put. With half, the entry of replies does not know that
// the flow is masqueraded, if that of the client's packets does.
func (m *made) put(t *testing.T, w *world, half bool) {
	t.Helper()
	half = half && slices.ContainsFunc(m.notes, func(n note) bool { return n.role == fromClient })
	for _, n := range m.notes {
		f := m.flow
		if half && n.role == toClient && n.halfOpen {
			f = told(f)
		}
		f.Flags |= uint8(n.idle.Seconds()) & maps.FlowSent // one may know more than others
		f.Bytes = uint64(n.role)                           // each has its own
		w.put(t, f, n)
	}
}

// left returns what of m was put and not overwritten.
func (m *made) left(t *testing.T, w *world) []note {
	t.Helper()
	var left []note
	for _, n := range m.notes {
		in := w.Flows
		if n.halfOpen {
			in = w.Opening(m.flow.Proto)
		}
		v, ok, err := in.Lookup(m.flow.Key(n.role))
		must(t, err)
		if ok && v.BackendId == m.flow.BackendId {
			left = append(left, n)
		}
	}

	return left
}

// isOver says what should become of a flow with such entries, in other words
// than those of the code.
func isOver(proto uint8, notes []note) bool {
	idle := 1000 * time.Hour
	flows, resets, byClient, byBackend := 0, 0, 0, 0
	for _, n := range notes {
		idle = min(idle, n.idle)
		if !n.halfOpen || proto != udp && n.role == fromClient && (n.state == maps.FlowOpen || n.state == maps.FlowFin) {
			flows++
		}
		switch {
		case n.state == maps.FlowReset:
			resets++
		case n.state == maps.FlowFin && (n.role == fromClient || n.role == toBackend):
			byClient++
		case n.state == maps.FlowFin:
			byBackend++
		}
	}
	limit := 24 * time.Hour
	switch {
	case proto == udp && flows > 0:
		limit = 2 * time.Minute
	case proto == udp:
		limit = 30 * time.Second
	case resets > 0 || byClient*byBackend > 0:
		limit = 10 * time.Second
	case byClient+byBackend > 0:
		limit = time.Hour
	case flows == 0:
		limit = 2 * time.Minute
	}

	return idle > limit+time.Second
}

// Whatever the tables hold, a sweep ends the flows that are over, with all their
// entries, and touches no entry of another.
func TestExpiryIsExact(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			w := newWorld(t, 1<<14)
			all := mustMake(t, w, rand.New(rand.NewPCG(seed, 0)), 1500)
			before := make([][]note, len(all))
			var over uint64
			for i := range all {
				before[i] = all[i].left(t, w)
				if len(before[i]) > 0 && isOver(all[i].flow.Proto, before[i]) {
					over++
				}
			}
			status := w.mustSweep(t, w.sweeper(t))
			for i := range all {
				want := len(before[i])
				if isOver(all[i].flow.Proto, before[i]) {
					want = 0
				}
				if have := all[i].left(t, w); len(have) != want {
					t.Errorf("flow %d of protocol %d: %d entries left, want %d of %v", i, all[i].flow.Proto, len(have), want, before[i])
				}
			}
			if status.Expired != over || over == 0 || over == uint64(len(all)) {
				t.Errorf("%d flows expired, want %d", status.Expired, over)
			}
		})
	}
}
