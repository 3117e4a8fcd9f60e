package maglev

import (
	"encoding/binary"
	"net/netip"
)

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
