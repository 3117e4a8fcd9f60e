package flow

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// made is a flow in the tables, with its entries.
type made struct {
	flow  maps.Flow
	notes []note
}

// mustMake fills tables at random. Some flows share client and original destination with one to
// another backend, some have lost entries, some are moving to the other table, and some were
// masqueraded after their first entry was written.
func mustMake(t *testing.T, w *world, r *rand.Rand, n int) []made {
	t.Helper()
	var all []made
	ages := []time.Duration{0, time.Second, 8 * time.Second, 10*time.Second + 1, 12 * time.Second, 25 * time.Second,
		30*time.Second + 1, 40 * time.Second, 100 * time.Second, 120*time.Second + 1, 125 * time.Second, 50 * time.Minute, 2 * time.Hour, 23 * time.Hour, 25 * time.Hour}
	for i := range n {
		f := flowOf([]uint8{tcp, udp, sctp}[r.IntN(3)], i+1)
		if i > 0 && r.IntN(6) == 0 {
			f = unmasqueraded(all[i-1].flow)
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
				continue // evicted
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

// unmasqueraded returns f as it was before it was masqueraded.
func unmasqueraded(f maps.Flow) maps.Flow {
	f.Flags, f.Masquerade, f.MasqueradePort = 0, maps.Addr{}, 0

	return f
}

// put writes the entries. With half, the entry of replies lacks the masquerade, if that of the client's
// packets has it.
func (m *made) put(t *testing.T, w *world, half bool) {
	t.Helper()
	half = half && slices.ContainsFunc(m.notes, func(n note) bool { return n.role == fromClient })
	for _, n := range m.notes {
		f := m.flow
		if half && n.role == toClient && n.halfOpen {
			f = unmasqueraded(f)
		}
		f.Flags |= uint8(n.idle.Seconds()) & maps.FlowSent // entries may differ in this flag
		f.Bytes = uint64(n.role)                           // each entry has its own
		w.put(t, f, n)
	}
}

// left returns the entries of m that exist and were not overwritten.
func (m *made) left(t *testing.T, w *world) []note {
	t.Helper()
	var left []note
	for _, n := range m.notes {
		in := w.Flows
		if n.halfOpen {
			in = w.Opening(m.flow.Proto)
		}
		v, ok, err := in.Lookup(m.flow.Key(n.role))
		lab.Must(t, err)
		if ok && v.BackendId == m.flow.BackendId {
			left = append(left, n)
		}
	}

	return left
}

// isOver reports whether a flow with such entries must end, in a second implementation.
func isOver(proto uint8, notes []note) bool {
	idle := 1000 * time.Hour
	flows, resets, maybe, byClient, byBackend := 0, 0, 0, 0, 0
	for _, n := range notes {
		idle = min(idle, n.idle)
		if !n.halfOpen || proto != udp && n.role == fromClient && (n.state == maps.FlowOpen || n.state == maps.FlowFin) {
			flows++
		}
		switch {
		case n.state == maps.FlowReset && proto != tcp:
			resets++
		case n.state == maps.FlowReset:
			maybe++ // it may be forged
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
	case maybe+byClient+byBackend > 0:
		limit = time.Hour
	case flows == 0:
		limit = 2 * time.Minute
	}

	return idle > limit+time.Second
}

// A sweep ends exactly the idle flows, with all their entries, and touches no entry of another.
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
