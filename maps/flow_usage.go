package maps

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// What shares the table of flows: the indices of [FlowUsage].
const (
	FlowsConnected = uint32(abiFlowKindFLOWS_CONNECTED)
	FlowsUDP       = uint32(abiFlowKindFLOWS_UDP)
	FlowKindCount  = uint32(abiFlowKindFLOW_KIND_COUNT)
)

// FlowKind returns as what flows of a protocol count.
func FlowKind(protocol uint8) uint32 {
	if protocol == unix.IPPROTO_UDP {
		return FlowsUDP
	}

	return FlowsConnected
}

// Opening returns the table of the flows of a protocol that are half open.
func (p *Pinned) Opening(protocol uint8) *Map[FlowKey, Flow] {
	if FlowKind(protocol) == FlowsUDP {
		return p.Unanswered
	}

	return p.HalfOpen
}

// FlowUsage tells how many entries of each kind are in flows: the flow_usage map in this
// process' memory. Programs count in it at the same time.
type FlowUsage struct{ shared[int64] }

// Load returns how many entries of a kind there are.
func (u *FlowUsage) Load(kind uint32) int64 { return atomic.LoadInt64(&u.values[kind]) }

// Add adds n, which may be negative, to the entries of a kind.
func (u *FlowUsage) Add(kind uint32, n int64) { atomic.AddInt64(&u.values[kind], n) }
