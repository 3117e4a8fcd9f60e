// Package maglev makes the lookup tables of hashing algorithms:
// Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer",
// NSDI 2016, section 3.4. It is pure: the same backends have the same table on
// every node and in every version.
package maglev

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Table returns a lookup table of [Size] entries, which are indices of backends. The entry
// of a hash is the one at hash * length / 2^32.
//
// The numbers of entries of two backends differ by one at most. The table depends on the
// addresses and not on their order; if a backend is added or removed and the size stays,
// few entries of other backends change. Backends must not repeat. Without backends, the
// table is empty.
func Table(backends []netip.AddrPort, usual int) []int {
	table := make([]int, Size(len(backends), usual))
	for i := range table {
		table[i] = vacant
	}
	preferences := preferencesOf(backends, len(table))
	for filled := 0; filled < len(table); {
		for i := range preferences {
			if filled == len(table) {
				return table
			}
			p := &preferences[i]
			for table[p.next] != vacant {
				p.pass()
			}
			table[p.next] = p.backend
			p.pass()
			filled++
		}
	}

	return table
}

// vacant is an entry that no backend has taken yet.
const vacant = -1

// preference is the order in which one backend prefers the entries of a table: every
// skip-th entry, which visits all because the size is prime.
type preference struct {
	backend int
	next    uint32
	skip    uint32
	size    uint32
}

// pass goes on to the next entry.
func (p *preference) pass() {
	if p.next += p.skip; p.next >= p.size {
		p.next -= p.size
	}
}

// preferencesOf returns the preferences of the backends, in the order in which they choose.
func preferencesOf(backends []netip.AddrPort, size int) []preference {
	order := make([]int, len(backends))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return backends[a].Compare(backends[b]) })

	preferences := make([]preference, len(order))
	for i, backend := range order {
		first, step := hashes(backends[backend])
		preferences[i] = preference{backend: backend, size: uint32(size), next: uint32(first % uint64(size))}
		if size > 1 {
			preferences[i].skip = uint32(1 + step%uint64(size-1))
		}
	}

	return preferences
}

// hashes returns two independent hashes of a backend: FNV-1a of its address and port,
// mixed by the finalizer of SplitMix64. They must never change, because nodes of
// different versions must have the same tables.
func hashes(backend netip.AddrPort) (uint64, uint64) {
	addr := backend.Addr().As16()
	sum := uint64(0xcbf29ce484222325)
	for _, b := range binary.BigEndian.AppendUint16(addr[:], backend.Port()) {
		sum = (sum ^ uint64(b)) * 0x100000001b3
	}

	return spread(sum), spread(sum ^ 0x9e3779b97f4a7c15)
}

func spread(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb

	return x ^ x>>31
}

// Sizes are the usual sizes that tables can have. They are prime, and two tables of different size
// have nothing in common.
var Sizes = []int{251, 509, 1021, 2039, 4093, 8191, 16381}

// DefaultSize is the usual size where no other one is wanted.
const DefaultSize = 16381

// LargeSize is the size for more backends than have four entries each in a table of [DefaultSize].
const LargeSize = 65521

// Size returns the number of entries in the table of so many backends: one for one, the usual size
// for as many as have four entries each in it, and [DefaultSize] or [LargeSize] for more. It is the
// same for all numbers that a Service usually goes through, so that few entries of other backends
// change whenever a backend comes or goes.
func Size(backends, usual int) int {
	switch {
	case backends <= 1:
		return max(backends, 0)
	case backends <= usual/4:
		return usual
	case backends <= DefaultSize/4:
		return DefaultSize
	default:
		return LargeSize
	}
}
