package maps

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const filterWords = int(abiAddrFilterADDR_FILTER_WORDS)

// AddrFilter is the addr_filter map in this process' memory: a bit for every address in
// addrs, by a hash. One goroutine owns it.
type AddrFilter struct {
	words  []uint64
	counts map[uint32]uint32 // how many addresses have each bit that was added
	memory []byte            // of words, if the kernel has it, too
}

// NewFakeAddrFilter returns a filter that no kernel knows.
func NewFakeAddrFilter() *AddrFilter {
	return &AddrFilter{words: make([]uint64, filterWords), counts: make(map[uint32]uint32)}
}

func mapAddrFilter(m *ebpf.Map) (*AddrFilter, error) {
	memory, err := unix.Mmap(m.FD(), 0, filterWords*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: memory: %w", NameAddrFilter, err)
	}

	return &AddrFilter{
		words:  unsafe.Slice((*uint64)(unsafe.Pointer(&memory[0])), filterWords),
		counts: make(map[uint32]uint32), memory: memory,
	}, nil
}

// filterBit is the number of an address' bit: addr_filter_bit in bpf/lib/filter.h.
func filterBit(a Addr) uint32 {
	var folded uint32
	for i := 0; i < len(a.Bytes); i += 4 {
		folded = (folded ^ binary.BigEndian.Uint32(a.Bytes[i:])) * 0x9e3779b1
		folded ^= folded >> 15
	}
	// A product's high bits depend on all bits of its factors.
	folded *= 0x85ebca6b

	return uint32(uint64(folded) * uint64(abiAddrFilterADDR_FILTER_BITS) >> 32)
}

// Add sets the bit of an address that is about to be in addrs.
func (f *AddrFilter) Add(a Addr) {
	bit := filterBit(a)
	f.counts[bit]++
	atomic.OrUint64(&f.words[bit/64], 1<<(bit%64))
}

// Remove takes back one Add, when the address is in addrs no more.
func (f *AddrFilter) Remove(a Addr) {
	bit := filterBit(a)
	if f.counts[bit]--; f.counts[bit] == 0 {
		delete(f.counts, bit)
		atomic.AndUint64(&f.words[bit/64], ^uint64(1<<(bit%64)))
	}
}

// May says whether an address may be in addrs.
func (f *AddrFilter) May(a Addr) bool {
	bit := filterBit(a)

	return atomic.LoadUint64(&f.words[bit/64])>>(bit%64)&1 != 0
}

// Trim clears the bits that were not added: those that an earlier agent left.
func (f *AddrFilter) Trim() {
	want := make([]uint64, len(f.words))
	for bit := range f.counts {
		want[bit/64] |= 1 << (bit % 64)
	}
	for i, word := range want {
		atomic.StoreUint64(&f.words[i], word)
	}
}

func (f *AddrFilter) close() error {
	if f == nil || f.memory == nil {
		return nil
	}
	memory := f.memory
	f.words, f.memory = nil, nil

	return unix.Munmap(memory)
}
