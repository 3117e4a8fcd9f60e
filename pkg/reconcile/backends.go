package reconcile

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// backend is one (address, port) that answers for a service port.
type backend struct {
	addr maps.Addr
	id   uint32
	port uint16 // in host byte order

	flags   uint16 // as it should be
	have    uint16 // flags, as the map has them
	written bool
	alive   bool // keeps its flows, also when no frontend leads to it
	due     instant
}

// value is what the map should hold at b.id.
func (b *backend) value(p *port) maps.Backend {
	return maps.BackendOf(b.addrPort(), p.id, b.flags)
}

func (b *backend) addrPort() netip.AddrPort {
	return netip.AddrPortFrom(b.addr.IP(), b.port)
}

func (b *backend) compare(addr maps.Addr, port uint16) int {
	return cmp.Or(bytes.Compare(b.addr.Bytes[:], addr.Bytes[:]), cmp.Compare(b.port, port))
}

// search returns where in sorted the backend that answers at addr and port is, or
// belongs.
func search(sorted []backend, addr maps.Addr, port uint16) (int, bool) {
	return slices.BinarySearchFunc(sorted, port, func(b backend, port uint16) int {
		return b.compare(addr, port)
	})
}

// merge returns both lists, which are sorted and have no backend in common, as one.
func merge(list, more []backend) []backend {
	if len(list) == 0 {
		return more
	}
	from := len(list) - 1
	list = append(list, more...)
	for to := len(list) - 1; len(more) > 0; to-- {
		last := &more[len(more)-1]
		if from >= 0 && list[from].compare(last.addr, last.port) > 0 {
			list[to] = list[from]
			from--
		} else {
			list[to] = *last
			more = more[:len(more)-1]
		}
	}

	return list
}

// find returns the backend of p that answers at addr, or nil. The pointer is
// good until the next backend comes or goes.
func (p *port) findBackend(addr netip.AddrPort) *backend {
	i, ok := search(p.backends, maps.AddrOf(addr.Addr()), addr.Port())
	if !ok {
		return nil
	}

	return &p.backends[i]
}
