package maps

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// FlowCounts are the counts of flows since the maps were created, in entries.
type FlowCounts struct {
	FlowsPut          uint64 // into flows
	FlowsDeleted      uint64 // by programs, from flows
	HalfOpenPut       uint64 // into half_open and unanswered
	HalfOpenDeleted   uint64 // by programs, from these
	Repaired          uint64 // put back after an eviction
	MasqueradeRetries uint64 // a port was in use
	StackPorts        uint64 // flows whose client port was in use by another flow
}

// FlowCounts reads the counts, summed over all CPUs.
func (p *Pinned) FlowCounts() (FlowCounts, error) {
	var c FlowCounts
	for index, count := range map[abiFlowCount]*uint64{
		abiFlowCountCOUNT_FLOWS_PUT:          &c.FlowsPut,
		abiFlowCountCOUNT_FLOWS_DELETED:      &c.FlowsDeleted,
		abiFlowCountCOUNT_HALF_OPEN_PUT:      &c.HalfOpenPut,
		abiFlowCountCOUNT_HALF_OPEN_DELETED:  &c.HalfOpenDeleted,
		abiFlowCountCOUNT_FLOWS_REPAIRED:     &c.Repaired,
		abiFlowCountCOUNT_MASQUERADE_RETRIES: &c.MasqueradeRetries,
		abiFlowCountCOUNT_STACK_PORTS:        &c.StackPorts,
	} {
		n, err := sumPerCPU(p.byName[NameFlowCounts], uint32(index))
		if err != nil {
			return c, fmt.Errorf("map %s: %w", NameFlowCounts, err)
		}
		*count = n
	}

	return c, nil
}

// sumPerCPU returns the sum over all CPUs of an element of a per-CPU array.
func sumPerCPU(m *ebpf.Map, index uint32) (uint64, error) {
	var perCPU []uint64
	if err := m.Lookup(index, &perCPU); err != nil {
		return 0, fmt.Errorf("index %d: %w", index, err)
	}
	var sum uint64
	for _, n := range perCPU {
		sum += n
	}

	return sum, nil
}
