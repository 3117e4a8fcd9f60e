package flow

import (
	"hash/maphash"

	"github.com/sluice-lb/sluice/maps"
)

// loads compares the loads of backends, by the index of their ids, with the flows that a scan found.
//
// Programs count a flow when it begins and when both sides have closed it, and the Sweeper counts
// when it ends one. An eviction is not counted. Flows begin and end during a scan, so the number found is
// not that of any one moment; but the possible error is known. Only what is certainly wrong is
// repaired, and that is all of it as soon as no flow begins during a scan.
type loads struct {
	before, after map[uint32]int32 // values in the map, without zeros
	found         map[uint32]int32
	// halfOpen are the flows found in half_open: they may move to flows, and be found there again.
	halfOpen map[uint64]struct{}
	seed     maphash.Seed
}

// isCounted reports whether the load of the backend includes the flow of an entry. All entries have
// the flag, but programs only update it in that of the client's packets.
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

// excess returns by how much a counter is certainly too high, or, if negative, too low: it was
// before and after a scan that found so many, during which no more than begun flows began.
//
// If none ended, the scan missed or found between zero and begun of them: without them, found is
// the counter before. Flows that ended may have been missed, too: they are at most those that began,
// less the growth of the counter.
func excess[N int32 | int64](before, after, found, begun N) N {
	most := before - found + begun
	least := after - found - begun
	switch {
	case least > most: // something else has happened
		return 0
	case least > 0:
		return least
	case most < 0:
		return most
	default:
		return 0
	}
}

// repair corrects what is certainly wrong about the loads of backends, and the usage of the map flows:
// an agent was killed, or the kernel has evicted an entry.
func (s *Sweeper) repair(st scanned) {
	// Each flow that begins writes at least one new entry. An evicted flow that came back is one that
	// no counter had subtracted.
	if begun := int32(st.after.HalfOpenPut - st.before.HalfOpenPut); st.after.Repaired == st.before.Repaired {
		for index, after := range st.loads.after {
			n := excess(st.loads.before[index], after, st.loads.found[index], begun)
			if n == 0 {
				continue
			}
			s.maps.Loads.AddFlows(index, -n)
			s.status.LoadsRepaired += uint64(max(n, -n))
		}
	}
	begun := int64(st.after.FlowsPut - st.before.FlowsPut)
	for kind := range st.usage.found {
		n := excess(st.usage.before[kind], st.usage.after[kind], st.usage.found[kind], begun)
		s.maps.FlowUsage.Add(uint32(kind), -n)
	}
}

// byKind is the number of entries in flows of each kind.
type byKind [maps.FlowKindCount]int64

// usages compares the usage of the map flows with the entries that a scan found. As for loads, only what is
// certainly wrong is repaired.
type usages struct {
	before, after byKind // values in the map
	found         byKind
}

func (s *Sweeper) readUsage() (u byKind) {
	for kind := range u {
		u[kind] = s.maps.FlowUsage.Load(uint32(kind))
	}

	return u
}

// percent returns how full flows is for the kind with the least room, by the limits that programs use:
// bpf/lib/flow.h.
func (u byKind) percent(room int64) int {
	connected, datagrams := u[maps.FlowsConnected], u[maps.FlowsUDP]

	return int(max(
		100*connected/max(room-max(datagrams, room/4), 1),
		100*datagrams/max(room-max(connected, room/2), 1),
	))
}
