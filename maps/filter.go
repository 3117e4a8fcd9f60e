package maps

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// shared are the values of an array that is mapped into this process' memory and shared with
// programs. Those of a fake are in ordinary memory.
type shared[V any] struct {
	values []V
	memory []byte // of a map
}

// mapShared maps an array into memory. Its values are multiples of eight bytes, and consist of
// values of type V.
func mapShared[V any](m *ebpf.Map, name string) (shared[V], error) {
	memory, err := unix.Mmap(m.FD(), 0, int(m.MaxEntries()*m.ValueSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return shared[V]{}, fmt.Errorf("map %s: memory: %w", name, err)
	}
	var v V

	return shared[V]{unsafe.Slice((*V)(unsafe.Pointer(&memory[0])), len(memory)/int(unsafe.Sizeof(v))), memory}, nil
}

func (s *shared[V]) close() error {
	memory := s.memory
	s.values, s.memory = nil, nil
	if memory == nil {
		return nil
	}

	return unix.Munmap(memory)
}

// AddrFilter is the addr_filter map in this process' memory: a bit for every address in addrs, by
// a hash, and a second one for those of this node. One goroutine owns it.
type AddrFilter struct {
	shared[uint64]
	counts map[uint32]uint32 // addresses per bit
}

// newAddrFilter returns a filter in [abiAddrFilterADDR_FILTER_WORDS] words of memory.
func newAddrFilter(words shared[uint64]) *AddrFilter {
	return &AddrFilter{words, make(map[uint32]uint32)}
}

// addrHash returns the same hash as addr_hash in bpf/lib/addr.h.
func addrHash(a Addr) uint32 {
	var folded uint32
	for i := 0; i < len(a.Bytes); i += 4 {
		folded = (folded ^ binary.BigEndian.Uint32(a.Bytes[i:])) * 0x9e3779b1
		folded ^= folded >> 15
	}
	// The high bits of a product depend on all bits of its factors.
	return folded * 0x85ebca6b
}

// part returns the index of the part, of n equal parts of all hashes, that a hash is in.
func part(hash uint32, n int) uint32 { return uint32(uint64(hash) * uint64(n) >> 32) }

// filterBit returns the number of the bit of an address.
func filterBit(a Addr) uint32 { return part(addrHash(a), int(abiAddrFilterADDR_FILTER_BITS)) }

// nodeBit returns the number of the second bit of an address of this node.
func nodeBit(a Addr) uint32 { return part(^addrHash(a), int(abiAddrFilterADDR_FILTER_BITS)) }

// Add sets the bit of an address, before that is put into addrs.
func (f *AddrFilter) Add(a Addr) { f.set(filterBit(a)) }

// AddNode sets the second bit of an address, before its entry in addrs gets the flag [AddrNode]. The
// bit stays until the next [AddrFilter.Trim] of another process.
func (f *AddrFilter) AddNode(a Addr) { f.set(nodeBit(a)) }

func (f *AddrFilter) set(bit uint32) {
	f.counts[bit]++
	atomic.OrUint64(&f.values[bit/64], 1<<(bit%64))
}

// Remove reverts one Add, after the address is deleted from addrs.
func (f *AddrFilter) Remove(a Addr) {
	bit := filterBit(a)
	if f.counts[bit]--; f.counts[bit] == 0 {
		delete(f.counts, bit)
		atomic.AndUint64(&f.values[bit/64], ^uint64(1<<(bit%64)))
	}
}

// May reports whether an address may be in addrs.
func (f *AddrFilter) May(a Addr) bool { return f.isSet(filterBit(a)) }

// MayNode reports whether an address may be one of this node.
func (f *AddrFilter) MayNode(a Addr) bool { return f.isSet(nodeBit(a)) }

func (f *AddrFilter) isSet(bit uint32) bool {
	return atomic.LoadUint64(&f.values[bit/64])>>(bit%64)&1 != 0
}

// Trim clears the bits that were not added, which an earlier agent has left.
func (f *AddrFilter) Trim() {
	want := make([]uint64, len(f.values))
	for bit := range f.counts {
		want[bit/64] |= 1 << (bit % 64)
	}
	for i, word := range want {
		atomic.StoreUint64(&f.values[i], word)
	}
}

// CIDRCovers is the cidr_covers map in this process' memory, the filter of service_cidrs. One
// goroutine owns it.
type CIDRCovers struct {
	shared[uint64]
	counts map[uint64]int // CIDRs per cover
}

func newCIDRCovers(prefixes shared[uint64]) *CIDRCovers {
	return &CIDRCovers{prefixes, make(map[uint64]int)}
}

// allAddrs is the cover of all addresses.
const allAddrs = uint64(1) << 63

// coverOf returns the cover of a CIDR: see types.h.
func coverOf(k CIDRKey) uint64 {
	begin, bits := binary.BigEndian.Uint64(k.Addr.Bytes[:]), min(int(k.PrefixLen), 63)
	if k.Addr.IP().Is4() && k.PrefixLen >= 96 {
		begin, bits = uint64(binary.BigEndian.Uint32(k.Addr.Bytes[12:]))<<32, int(k.PrefixLen)-96
	}
	last := uint64(1) << (63 - bits)

	return begin&^(last|(last-1)) | last
}

// Add covers a CIDR before it is put into service_cidrs. If there is no room for its cover, all
// addresses are covered from then on.
func (c *CIDRCovers) Add(k CIDRKey) {
	cover := coverOf(k)
	c.counts[cover]++
	if slices.Contains(c.values, cover) || slices.Contains(c.values, allAddrs) {
		return
	}
	i := slices.Index(c.values, 0)
	if i < 0 {
		i, cover = 0, allAddrs
	}
	atomic.StoreUint64(&c.values[i], cover)
}

// Remove reverts one Add, after the CIDR is deleted from service_cidrs.
func (c *CIDRCovers) Remove(k CIDRKey) {
	cover := coverOf(k)
	if c.counts[cover]--; c.counts[cover] > 0 {
		return
	}
	delete(c.counts, cover)
	if i := slices.Index(c.values, cover); i >= 0 {
		atomic.StoreUint64(&c.values[i], 0)
	}
}

// May reports whether an address may be in a Service CIDR.
func (c *CIDRCovers) May(a Addr) bool {
	whole := coverOf(CIDRKey{PrefixLen: 128, Addr: a})
	for i := range c.values {
		if cover := atomic.LoadUint64(&c.values[i]); (whole^cover)>>1 < cover&-cover {
			return true
		}
	}

	return false
}

// PortFilter is the port_filter map in this process' memory: the ports of this node that Services
// may use. Programs write it, too.
type PortFilter struct{ shared[byte] }

// Add marks a node port, before its frontend is published.
func (f *PortFilter) Add(port uint16) { f.values[port] = 1 }

// fill marks all ports.
func (f *PortFilter) fill() {
	for i := range f.values {
		f.values[i] = 1
	}
}

// May reports whether Services may use a port.
func (f *PortFilter) May(port uint16) bool { return f.values[port] != 0 }

// SourceFilter is the source_filter map in this process' memory: the sources of packets at egress
// that may belong to flows. Programs write it, too.
type SourceFilter struct{ shared[uint32] }

// sourceCellTime returns the time that programs write to a cell.
func sourceCellTime(now uint64) uint32 { return uint32(now>>abiSourceFilterSOURCE_CELL_SHIFT) + 1 }

// sourceCell returns the number of the cell of an entry at [HookEgress].
func sourceCell(k FlowKey, role uint8) uint32 {
	cell := uint32(abiSourceFilterSOURCE_CELL_ALL)
	if role != FlowToBackend {
		if cell = uint32(Port(k.SrcPort)*0x9e37) / (1 << 16 / uint32(abiSourceFilterSOURCE_CELLS)); cell == 0 {
			cell = 1
		}
	}

	return part(addrHash(k.Src), int(abiSourceFilterSOURCE_LINES))*uint32(abiSourceFilterSOURCE_CELLS) + cell
}

// fill marks all sources, until a sweep finds those of flows.
func (f *SourceFilter) fill() {
	for at, i := Now(), 0; i < len(f.values); i++ {
		atomic.StoreUint32(&f.values[i], sourceCellTime(at))
	}
}

// Now returns the time as programs know it: bpf_ktime_get_ns, which is CLOCK_MONOTONIC. It does
// not advance while the machine is suspended.
func Now() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it cannot fail: the clock exists

	return uint64(now.Nano())
}

// Heartbeat is the heartbeat map in this process' memory. The agent beats every few seconds.
type Heartbeat struct{ shared[uint64] }

// Beat notes that the agent runs.
func (h *Heartbeat) Beat() { atomic.StoreUint64(&h.values[0], Now()) }

// LastBeat returns when the agent last ran, or the zero time if none has since the map was made, or there is no map.
func (h *Heartbeat) LastBeat() time.Time {
	if len(h.values) == 0 {
		return time.Time{}
	}
	beat := atomic.LoadUint64(&h.values[0])
	if beat == 0 {
		return time.Time{}
	}

	return time.Now().Add(-time.Duration(Now() - beat))
}

// May reports whether a packet with this key at [HookEgress] may belong to a flow.
func (f *SourceFilter) May(k FlowKey) bool {
	return f.values[sourceCell(k, FlowToClient)]|f.values[sourceCell(k, FlowToBackend)] != 0
}

// Note writes the time for an entry at [HookEgress], as programs do before they put it.
func (f *SourceFilter) Note(k FlowKey, role uint8, now uint64) {
	f.values[sourceCell(k, role)] = sourceCellTime(now)
}

// SourceSweep clears the cells of sources whose flows are gone. After [SourceFilter.Begin], the
// caller waits until every running program has ended (see [Pinned.WaitForPrograms]), calls Keep
// for each entry of flows, half_open and unanswered, and then End. A program that puts an entry
// meanwhile renews a cell that Begin found to be old.
type SourceSweep struct {
	filter *SourceFilter
	old    map[uint32]uint32 // the times in old cells
}

// Begin finds the old cells: those that no program has written for long.
func (f *SourceFilter) Begin(now uint64) SourceSweep {
	s := SourceSweep{filter: f, old: make(map[uint32]uint32)}
	for i := range f.values {
		have := atomic.LoadUint32(&f.values[i])
		if have != 0 && int32(sourceCellTime(now)-have) > int32(abiSourceFilterSOURCE_CELL_FRESH) {
			s.old[uint32(i)] = have
		}
	}

	return s
}

// Idle reports whether no cell is old.
func (s SourceSweep) Idle() bool { return len(s.old) == 0 }

// Keep keeps the cells of an entry that exists: that of its port, and for packets to a backend, that of all ports of the client
// as well, which a program writes when the flow is confirmed. The packets to the backend that a socket has dialed
// look for the cell of its answers, when the connection was re-steered.
func (s SourceSweep) Keep(k FlowKey, f *Flow) {
	if k.Hook == HookEgress {
		delete(s.old, sourceCell(k, f.Role))
		delete(s.old, sourceCell(k, FlowToClient))
	} else if f.Flags&FlowResteered != 0 {
		delete(s.old, sourceCell(FlowKey{Src: k.Dst, SrcPort: k.DstPort}, FlowToClient))
	}
}

// End clears the old cells of which no entry was kept, unless a program has written them
// meanwhile.
func (s SourceSweep) End() {
	for i, had := range s.old {
		atomic.CompareAndSwapUint32(&s.filter.values[i], had, 0)
	}
}
