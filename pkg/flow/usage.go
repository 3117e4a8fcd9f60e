package flow

import "github.com/sluice-lb/sluice/maps"

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
