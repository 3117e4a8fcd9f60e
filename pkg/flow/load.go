package flow

import (
	"hash/maphash"

	"github.com/sluice-lb/sluice/maps"
)

// loads is what a look at all flows says about the loads of backends, by the
// index of their ids.
//
// Programs count a flow where it begins and where both sides have said their last,
// and we where we end it. One that is pushed out of its table goes uncounted. Flows
// begin and end while we look, so what is found is not what there was at any one
// moment; but it is known how far it can be off. Only what is certainly wrong is
// put right, and that is all of it as soon as there is a look in which no flow
// began.
type loads struct {
	before, after map[uint32]int32 // what the map said; zeros are left out
	found         map[uint32]int32
	// halfOpen are the flows that were found half open: they may be open, and
	// found again, a moment later.
	halfOpen map[uint64]struct{}
	seed     maphash.Seed
}

// readLoads begins a look.
func (s *Sweeper) readLoads() loads {
	l := loads{
		before: make(map[uint32]int32), after: make(map[uint32]int32), found: make(map[uint32]int32),
		halfOpen: make(map[uint64]struct{}), seed: maphash.MakeSeed(),
	}
	for index, load := range s.maps.Loads.All() {
		if load.Flows != 0 {
			l.before[index] = load.Flows
		}
	}

	return l
}

// isCounted says that an entry has its flow in the load of its backend. The flag is
// in all entries, but only kept right in this one.
func isCounted(f *maps.Flow) bool {
	return f.Role == maps.FlowFromClient && f.Flags&maps.FlowCounted != 0
}

func (l *loads) add(t table, key maps.FlowKey, f *maps.Flow) {
	if !isCounted(f) {
		return
	}
	type opening struct {
		key     maps.FlowKey
		created uint64
	}
	id := maphash.Comparable(l.seed, opening{key, f.Created})
	if _, again := l.halfOpen[id]; again {
		return
	}
	if t.halfOpen {
		l.halfOpen[id] = struct{}{}
	}
	l.found[maps.Index(f.BackendId)]++
}

// readLoadsAgain ends a look.
func (s *Sweeper) readLoadsAgain(l *loads) {
	for _, loads := range []map[uint32]int32{l.before, l.found} {
		for index := range loads {
			l.after[index] = s.maps.Loads.Get(index).Flows
		}
	}
}

// excess returns by how many flows the load of a backend is certainly too high, or too
// low if it is negative. No more than begun flows began during the look.
//
// If none ended either, all of begun may have been missed, or found: the load that
// was said before is found, but for that. Those that ended may have been missed,
// too: they are the ones that began, less by what the load has grown.
func (l *loads) excess(index uint32, begun int32) int32 {
	return excess(l.before[index], l.after[index], l.found[index], begun)
}

// excess is that for any count: what it said before and after, what was found, and how many began.
func excess[N int32 | int64](before, after, found, begun N) N {
	most := before - found + begun
	least := after - found - begun
	switch {
	case least > most: // what happened was something else
		return 0
	case least > 0:
		return least
	case most < 0:
		return most
	default:
		return 0
	}
}

// repairLoads puts right what is certainly wrong about the loads of backends.
func (s *Sweeper) repairLoads(st stock) {
	if st.after.Repaired != st.before.Repaired {
		return // flows came back that had not gone by anybody's count
	}
	// Each flow that begins puts one entry at least where there was none.
	begun := int32(st.after.HalfOpenPut - st.before.HalfOpenPut)
	for index := range st.loads.after {
		n := st.loads.excess(index, begun)
		if n == 0 {
			continue
		}
		s.maps.Loads.AddFlows(index, -n)
		s.status.LoadsRepaired += uint64(max(n, -n))
	}
}

// byKind is how many entries each kind of flows has in flows.
type byKind [maps.FlowKindCount]int64

// usages is what a look at all flows says about them. As of loads, only what is certainly wrong
// is put right.
type usages struct {
	before, after byKind // what the map said
	found         byKind
}

func (s *Sweeper) readUsage() (u byKind) {
	for kind := range u {
		u[kind] = s.maps.FlowUsage.Load(uint32(kind))
	}

	return u
}

// repairUsage puts right what is certainly wrong about how much room flows has: an agent may have been
// killed, or the kernel have pushed something out.
func (s *Sweeper) repairUsage(st stock) {
	begun := int64(st.after.FlowsPut - st.before.FlowsPut)
	for kind := range st.usage.found {
		n := excess(st.usage.before[kind], st.usage.after[kind], st.usage.found[kind], begun)
		s.maps.FlowUsage.Add(uint32(kind), -n)
	}
}

// percent returns how full the fuller kind finds flows, of the room that there is in all, as
// programs see it: bpf/lib/share.h.
func (u byKind) percent(room int64) int {
	connected, datagrams := u[maps.FlowsConnected], u[maps.FlowsUDP]

	return int(max(
		100*connected/max(room-max(datagrams, room/4), 1),
		100*datagrams/max(room-max(connected, room/2), 1),
	))
}
