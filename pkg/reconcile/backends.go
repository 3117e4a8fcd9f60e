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

func (p *port) search(addr maps.Addr, port uint16) (int, bool) {
	return slices.BinarySearchFunc(p.backends, port, func(b backend, port uint16) int {
		return b.compare(addr, port)
	})
}

// find returns the backend of p that answers at addr, or nil. The pointer is
// good until the next backend comes or goes.
func (p *port) findBackend(addr netip.AddrPort) *backend {
	i, ok := p.search(maps.AddrOf(addr.Addr()), addr.Port())
	if !ok {
		return nil
	}

	return &p.backends[i]
}

// backend returns the backend of p that answers at addr, after giving it an id
// if it is new.
func (r *Reconciler) backend(p *port, addr netip.AddrPort) *backend {
	key := maps.AddrOf(addr.Addr())
	i, ok := p.search(key, addr.Port())
	if !ok {
		p.backends = slices.Insert(p.backends, i, backend{addr: key, port: addr.Port(), id: r.backendIDs.take()})
	}

	return &p.backends[i]
}

// hasWritten says whether the backend of p with this id is in the map.
func (p *port) hasWritten(id uint32) bool {
	return slices.ContainsFunc(p.backends, func(b backend) bool { return b.id == id && b.written })
}
