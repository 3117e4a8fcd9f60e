package maps

import (
	"encoding/binary"
	"fmt"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// shared are the values of an array in this process' memory, which programs have, too; or, of
// a fake, nobody.
type shared[V any] struct {
	values []V
	memory []byte // of a map
}

// mapShared brings an array into this process' memory. Its values are multiples of eight
// bytes, and consist of values of type V.
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

// AddrFilter is the addr_filter map in this process' memory: a bit for every address in
// addrs, by a hash. One goroutine owns it.
type AddrFilter struct {
	shared[uint64]
	counts map[uint32]uint32 // how many addresses have each bit that was added
}

// newAddrFilter returns the filter in a memory of [abiAddrFilterADDR_FILTER_WORDS] words.
func newAddrFilter(words shared[uint64]) *AddrFilter {
	return &AddrFilter{words, make(map[uint32]uint32)}
}

// addrHash is addr_hash in bpf/lib/filter.h.
func addrHash(a Addr) uint32 {
	var folded uint32
	for i := 0; i < len(a.Bytes); i += 4 {
		folded = (folded ^ binary.BigEndian.Uint32(a.Bytes[i:])) * 0x9e3779b1
		folded ^= folded >> 15
	}
	// A product's high bits depend on all bits of its factors.
	return folded * 0x85ebca6b
}

// part returns which of n equal parts of all hashes one is in.
func part(hash uint32, n int) uint32 { return uint32(uint64(hash) * uint64(n) >> 32) }

// filterBit is the number of an address' bit.
func filterBit(a Addr) uint32 { return part(addrHash(a), int(abiAddrFilterADDR_FILTER_BITS)) }

// Add sets the bit of an address that is about to be in addrs.
func (f *AddrFilter) Add(a Addr) {
	bit := filterBit(a)
	f.counts[bit]++
	atomic.OrUint64(&f.values[bit/64], 1<<(bit%64))
}

// Remove takes back one Add, when the address is in addrs no more.
func (f *AddrFilter) Remove(a Addr) {
	bit := filterBit(a)
	if f.counts[bit]--; f.counts[bit] == 0 {
		delete(f.counts, bit)
		atomic.AndUint64(&f.values[bit/64], ^uint64(1<<(bit%64)))
	}
}

// May says whether an address may be in addrs.
func (f *AddrFilter) May(a Addr) bool {
	bit := filterBit(a)

	return atomic.LoadUint64(&f.values[bit/64])>>(bit%64)&1 != 0
}

// Trim clears the bits that were not added: those that an earlier agent left.
func (f *AddrFilter) Trim() {
	want := make([]uint64, len(f.values))
	for bit := range f.counts {
		want[bit/64] |= 1 << (bit % 64)
	}
	for i, word := range want {
		atomic.StoreUint64(&f.values[i], word)
	}
}

// CIDRCovers is the cidr_covers map in this process' memory: what of an address is compared
// before service_cidrs is looked at. One goroutine owns it.
type CIDRCovers struct {
	shared[uint64]
	counts map[uint64]int // how many CIDRs each covers that were added
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

// Add covers a CIDR that is about to be in service_cidrs. Where there are more than there is
// room for, all addresses are covered from then on.
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

// Remove takes back one Add, when the CIDR is in service_cidrs no more.
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

// May says whether an address may be in a Service CIDR.
func (c *CIDRCovers) May(a Addr) bool {
	whole := coverOf(CIDRKey{PrefixLen: 128, Addr: a})
	for i := range c.values {
		if cover := atomic.LoadUint64(&c.values[i]); (whole^cover)>>1 < cover&-cover {
			return true
		}
	}

	return false
}

// PortFilter is the port_filter map in this process' memory: which ports of this node may be
// ours. Programs write it, too.
type PortFilter struct{ shared[byte] }

// Add notes a node port, before its frontend is there.
func (f *PortFilter) Add(port uint16) { f.values[port] = 1 }

// fill has all ports be taken for ones that may be ours.
func (f *PortFilter) fill() {
	for i := range f.values {
		f.values[i] = 1
	}
}

// May says whether a port may be ours.
func (f *PortFilter) May(port uint16) bool { return f.values[port] != 0 }

// SourceFilter is the source_filter map in this process' memory: from where packets may come
// that leave this node and are of a flow. Programs write it, too.
type SourceFilter struct{ shared[uint32] }

// sourceCellTime is the time that programs write to a cell.
func sourceCellTime(now uint64) uint32 { return uint32(now>>abiSourceFilterSOURCE_CELL_SHIFT) + 1 }

// sourceCell is the number of the cell of an entry at [HookEgress].
func sourceCell(k FlowKey, role uint8) uint32 {
	cell := uint32(abiSourceFilterSOURCE_CELL_ALL)
	if role != FlowToBackend {
		if cell = uint32(Port(k.SrcPort)*0x9e37) / (1 << 16 / uint32(abiSourceFilterSOURCE_CELLS)); cell == 0 {
			cell = 1
		}
	}

	return part(addrHash(k.Src), int(abiSourceFilterSOURCE_LINES))*uint32(abiSourceFilterSOURCE_CELLS) + cell
}

// fill has all packets be taken for ones that may be of a flow, until a sweep finds which are.
func (f *SourceFilter) fill() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it cannot fail: the clock exists
	for i := range f.values {
		atomic.StoreUint32(&f.values[i], sourceCellTime(uint64(now.Nano())))
	}
}

// May says whether a packet with this key at [HookEgress] may be of a flow.
func (f *SourceFilter) May(k FlowKey) bool {
	return f.values[sourceCell(k, FlowToClient)]|f.values[sourceCell(k, FlowToBackend)] != 0
}

// Note writes the time for an entry at [HookEgress], as programs do before they put it.
func (f *SourceFilter) Note(k FlowKey, role uint8, now uint64) {
	f.values[sourceCell(k, role)] = sourceCellTime(now)
}

// SourceSweep ends what the source filter has of flows that are gone. Between [SourceFilter.Begin]
// and End, every program that is running has to end (see [Pinned.WaitForPrograms]), and then
// each entry of flows, half_open and unanswered is to be Kept: one that a program puts now renews a cell
// that was found to be old.
type SourceSweep struct {
	filter *SourceFilter
	old    map[uint32]uint32 // what was in cells that no program has written for long
}

// Begin looks for cells that no program has written for long.
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

// Idle says that no cell is old.
func (s SourceSweep) Idle() bool { return len(s.old) == 0 }

// Keep notes an entry that there is.
func (s SourceSweep) Keep(k FlowKey, role uint8) {
	if k.Hook == HookEgress {
		delete(s.old, sourceCell(k, role))
	}
}

// End clears the cells of which no entry was Kept, but those that a program has written meanwhile.
func (s SourceSweep) End() {
	for i, had := range s.old {
		atomic.CompareAndSwapUint32(&s.filter.values[i], had, 0)
	}
}
