package maps

import (
	"fmt"
	"math/bits"
	"net/netip"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// The hooks of a device, in a [FlowKey].
const (
	HookIngress = uint8(abiHookHOOK_INGRESS)
	HookEgress  = uint8(abiHookHOOK_EGRESS)
)

// The roles of the entries of a flow. flow_types.h explains them.
const (
	FlowFromClient  = uint8(abiFlowRoleFLOW_FROM_CLIENT)
	FlowToClient    = uint8(abiFlowRoleFLOW_TO_CLIENT)
	FlowToBackend   = uint8(abiFlowRoleFLOW_TO_BACKEND)
	FlowFromBackend = uint8(abiFlowRoleFLOW_FROM_BACKEND)
)

// The states of one side of a flow.
const (
	FlowNew   = uint8(abiFlowStateFLOW_NEW)
	FlowOpen  = uint8(abiFlowStateFLOW_OPEN)
	FlowFin   = uint8(abiFlowStateFLOW_FIN)
	FlowReset = uint8(abiFlowStateFLOW_RESET)

	FlowAbandoned = uint8(abiFlowStateFLOW_ABANDONED)
	FlowJoining   = uint8(abiFlowStateFLOW_JOINING)
)

// Bits of the Ending of a TCP [Flow]: both sides have ended, and the backend is in TIME_WAIT.
const (
	FlowOver     = uint8(abiFlowEndingFLOW_OVER)
	FlowTimeWait = uint8(abiFlowEndingFLOW_TIME_WAIT)
)

// Flags of a [Flow].
const (
	FlowMasqueraded = uint8(abiFlowFlagFLOW_MASQUERADED)
	FlowResteered   = uint8(abiFlowFlagFLOW_RESTEERED)
	FlowSent        = uint8(abiFlowFlagFLOW_SENT)
	FlowCounted     = uint8(abiFlowFlagFLOW_COUNTED)
	FlowByPods      = uint8(abiFlowFlagFLOW_BY_PODS)
	FlowByUplinks   = uint8(abiFlowFlagFLOW_BY_UPLINKS)
	FlowOfNode      = uint8(abiFlowFlagFLOW_OF_NODE)
	FlowTurned      = uint8(abiFlowFlagFLOW_TURNED)
)

// The classes of devices.
const (
	DevicePods   = uint32(abiDeviceClassDEVICE_PODS)
	DeviceUplink = uint32(abiDeviceClassDEVICE_UPLINK)
)

// DeviceOfNode is the key of the node itself among devices: the addresses by which its own processes are clients.
const DeviceOfNode = uint32(0)

// DeviceTurns is a flag of a [Device]: packets may leave by it without passing the stack.
const DeviceTurns = uint32(abiDeviceFlagDEVICE_TURNS)

// DeviceLeadsOut is a flag of a [Device]: it leads to other hosts only, and to no pod of this node.
const DeviceLeadsOut = uint32(abiDeviceFlagDEVICE_LEADS_OUT)

// DeviceUnseen is a flag of a [Device]: it does not lead out, and what leaves by it passes no program there, nor at a port of it.
const DeviceUnseen = uint32(abiDeviceFlagDEVICE_UNSEEN)

// DeviceEncrypts is a flag of a [Device]: the node has policies of IPsec, which the stack applies as it routes.
const DeviceEncrypts = uint32(abiDeviceFlagDEVICE_ENCRYPTS)

// DeviceAbove is a flag of a [Device]: packets from the wire pass another device here first, as they do below an ipvlan.
const DeviceAbove = uint32(abiDeviceFlagDEVICE_ABOVE)

// FlowKeyOf returns the key of a packet as it arrives at a hook.
func FlowKeyOf(hook, protocol uint8, src, dst netip.AddrPort) FlowKey {
	return FlowKey{
		Src: AddrOf(src.Addr()), SrcPort: Port(src.Port()),
		Dst: AddrOf(dst.Addr()), DstPort: Port(dst.Port()),
		Proto: protocol, Hook: hook,
	}
}

// Source returns the source of the packet.
func (k FlowKey) Source() netip.AddrPort { return addrPort(k.Src, k.SrcPort) }

// Destination returns the destination of the packet.
func (k FlowKey) Destination() netip.AddrPort { return addrPort(k.Dst, k.DstPort) }

// ClientAddrPort returns the client, as on the wire.
func (f Flow) ClientAddrPort() netip.AddrPort { return addrPort(f.Client, f.ClientPort) }

// StackAddrPort returns the client as the node's own network stack, netfilter
// and a backend on this node see it.
func (f Flow) StackAddrPort() netip.AddrPort { return addrPort(f.Client, f.StackPort) }

// OriginalAddrPort returns the original destination: the frontend to which the client has
// connected.
func (f Flow) OriginalAddrPort() netip.AddrPort { return addrPort(f.OriginalDst, f.OriginalPort) }

// BackendAddrPort returns the backend.
func (f Flow) BackendAddrPort() netip.AddrPort { return addrPort(f.Backend, f.BackendPort) }

// MasqueradeAddrPort returns the source that the backend sees, if the flow is masqueraded.
func (f Flow) MasqueradeAddrPort() netip.AddrPort { return addrPort(f.Masquerade, f.MasqueradePort) }

// IsMasqueraded reports whether the backend sees this node instead of the client.
func (f Flow) IsMasqueraded() bool { return f.Flags&FlowMasqueraded != 0 }

// IsTurned reports whether the flow is turned around: it does not pass the node's network stack.
func (f Flow) IsTurned() bool { return f.Flags&FlowTurned != 0 }

// IsOfNode reports whether the client is a process of this node.
func (f Flow) IsOfNode() bool { return f.Flags&FlowOfNode == FlowOfNode }

// Roles returns the roles of the entries of the flow: two, or four if it is masqueraded and
// passes the stack.
func (f Flow) Roles() []uint8 {
	switch {
	case f.IsTurned():
		return []uint8{FlowFromClient, FlowFromBackend}
	case f.IsMasqueraded():
		return []uint8{FlowFromClient, FlowToClient, FlowToBackend, FlowFromBackend}
	default:
		return []uint8{FlowFromClient, FlowToClient}
	}
}

// Key returns the key of the entry of f that has this role.
func (f Flow) Key(role uint8) FlowKey {
	k := FlowKey{Proto: f.Proto, Hook: HookIngress}
	switch role {
	case FlowFromClient:
		k.Src, k.SrcPort, k.Dst, k.DstPort = f.Client, f.ClientPort, f.OriginalDst, f.OriginalPort
	case FlowToClient:
		k.Src, k.SrcPort, k.Dst, k.DstPort = f.Backend, f.BackendPort, f.Client, f.StackPort
		k.Hook = HookEgress
	case FlowToBackend:
		k.Src, k.SrcPort, k.Dst, k.DstPort = f.Client, f.StackPort, f.Backend, f.BackendPort
		k.Hook = HookEgress
	case FlowFromBackend:
		k.Src, k.SrcPort, k.Dst, k.DstPort = f.Backend, f.BackendPort, f.Masquerade, f.MasqueradePort
	}
	if f.IsOfNode() && role != FlowFromBackend {
		k.Hook = HookIngress + HookEgress - k.Hook
	}

	return k
}

// The kernel's overhead of an LRU hash map.
const (
	lruElementBytes = 48
	lruBucketBytes  = 16 // their number is the next power of two
)

// FlowMemory returns the bytes of kernel memory that flows, half_open or unanswered take with
// this capacity, whether in use or not.
func FlowMemory(entries int) uint64 {
	if entries < 1 {
		return 0
	}
	element := lruElementBytes + uint64(unsafe.Sizeof(FlowKey{})+unsafe.Sizeof(Flow{}))
	buckets := uint64(1) << bits.Len(uint(entries-1))

	return uint64(entries)*element + buckets*lruBucketBytes
}

// lruKept is how many free elements an LRU map may keep for each CPU. When fewer are left for
// all, it starts to evict.
const lruKept = 128

// FlowsRoom returns how many entries programs may put into flows so that the kernel evicts none
// of them. Of a table that is small for the number of CPUs it is a half, which does not rule
// evictions out.
func (p *Pinned) FlowsRoom() (int, error) {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return 0, fmt.Errorf("CPUs: %w", err)
	}
	capacity := p.Flows.Capacity()

	return max(capacity-lruKept*(cpus+1), capacity/2), nil
}

// The limits of the memory for FlowCapacities. Four fifths of it are for confirmed flows, and a tenth each for
// unconfirmed connections and unanswered datagrams.
const (
	minFlowMemory = 1 << 20
	maxFlowMemory = 1 << 36
	openingShare  = 10
)

// MemoryForFlows returns the memory, for [FlowCapacities], that has room for this many confirmed
// flows of two entries each.
func MemoryForFlows(flows int) uint64 {
	memory := FlowMemory(2*flows) / (openingShare - 2) * openingShare

	return min(max(memory, minFlowMemory), maxFlowMemory)
}

// FlowCapacities returns the capacities of flows, half_open and unanswered, for [Options], with
// which they take at most this many bytes together. A map that exists keeps its capacity.
func FlowCapacities(memory uint64) (map[string]uint32, error) {
	if memory < minFlowMemory || memory > maxFlowMemory {
		return nil, fmt.Errorf("memory for flows of %d bytes: it is from %d to %d", memory, minFlowMemory, maxFlowMemory)
	}
	opening := memory / openingShare

	return map[string]uint32{
		NameFlows:      flowsIn(memory - 2*opening),
		NameHalfOpen:   flowsIn(opening),
		NameUnanswered: flowsIn(opening),
	}, nil
}

// flowsIn returns how many entries fit into this many bytes.
func flowsIn(memory uint64) uint32 {
	tooMany := sort.Search(1<<31, func(entries int) bool { return FlowMemory(entries) > memory })

	return uint32(tooMany - 1)
}

func addrPort(a Addr, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.IP(), Port(port))
}

// The kinds of flows that share the table of flows: the indices of [FlowUsage].
const (
	FlowsConnected = uint32(abiFlowKindFLOWS_CONNECTED)
	FlowsUDP       = uint32(abiFlowKindFLOWS_UDP)
	FlowKindCount  = uint32(abiFlowKindFLOW_KIND_COUNT)
)

// FlowKind returns the kind in which flows of a protocol are counted.
func FlowKind(protocol uint8) uint32 {
	if protocol == unix.IPPROTO_UDP {
		return FlowsUDP
	}

	return FlowsConnected
}

// Opening returns the table of the half-open flows of a protocol.
func (p *Pinned) Opening(protocol uint8) *Map[FlowKey, Flow] {
	if FlowKind(protocol) == FlowsUDP {
		return p.Unanswered
	}

	return p.HalfOpen
}

// FlowUsage is the flow_usage map in this process' memory: the number of entries of each kind in
// flows. Programs write it, too.
type FlowUsage struct{ shared[int64] }

// Load returns the number of entries of a kind.
func (u *FlowUsage) Load(kind uint32) int64 { return atomic.LoadInt64(&u.values[kind]) }

// Add adds n, which may be negative, to the number of entries of a kind.
func (u *FlowUsage) Add(kind uint32, n int64) { atomic.AddInt64(&u.values[kind], n) }

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
