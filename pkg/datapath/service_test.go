package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// service is one service port, written into the maps by hand.
type service struct {
	proto     string   // tcp or udp
	at        []string // its frontends; port 0 is a catch-all, 0.0.0.0 a node port
	to        []string // its backends
	affinity  uint32   // seconds
	flags     uint16   // of its frontends
	algorithm uint8
	ranges    []string // source ranges
	id        uint32   // of its frontends: given by add, or kept
	backends  []uint32 // ids
	slotBase  uint32
	slotCount uint32
	table     []uint32 // of backends, if the algorithm hashes
}

func protocol(name string) uint8 {
	return map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}[name]
}

// add publishes a service, from the bottom up.
func (w *world) add(t testing.TB, s service) *service {
	t.Helper()
	if s.id == 0 {
		w.frontends++
		s.id = w.frontends
	}
	for _, to := range s.to {
		w.backends++
		s.backends = append(s.backends, w.backends)
		must(t, w.Maps().Backends.Put(w.backends, maps.BackendOf(netip.MustParseAddrPort(to), s.id, 0)))
	}
	for _, prefix := range s.ranges {
		s.flags |= maps.FrontendSourceRanges
		must(t, w.Maps().SourceRanges.Put(maps.SourceRangeKeyOf(s.id, netip.MustParsePrefix(prefix)), 1))
	}
	w.publish(t, &s, s.backends...)

	return &s
}

// publish gives a service a new extent with these backends.
func (w *world) publish(t testing.TB, s *service, backends ...uint32) {
	t.Helper()
	s.slotBase, s.slotCount = w.slots, uint32(len(backends))
	s.table = s.newTable(backends)
	w.slots += s.slotCount + uint32(len(s.table))
	for i, id := range slices.Concat(slices.Sorted(slices.Values(backends)), s.table) {
		must(t, w.Maps().Slots.Set(s.slotBase+uint32(i), id))
	}
	for _, at := range s.at {
		if a := netip.MustParseAddrPort(at).Addr(); !a.IsUnspecified() {
			w.mark(t, a, maps.AddrService)
		}
		must(t, w.Maps().Frontends.Put(s.key(at), s.frontend()))
	}
}

// mark says one more thing of an address.
func (w *world) mark(t testing.TB, a netip.Addr, flag uint32) {
	t.Helper()
	use, _, err := w.Maps().Addrs.Lookup(maps.AddrOf(a))
	must(t, err)
	use.Flags |= flag
	must(t, w.Maps().Addrs.Put(maps.AddrOf(a), use))
}

// newTable returns the table of these backends, nil if the algorithm needs none.
func (s *service) newTable(backends []uint32) []uint32 {
	if !reconcile.Hashes(s.algorithm) {
		return nil
	}
	addrs := make([]netip.AddrPort, len(backends))
	for i, id := range backends {
		addrs[i] = netip.MustParseAddrPort(s.to[slices.Index(s.backends, id)])
	}
	var table []uint32
	for _, i := range maglev.Table(addrs) {
		table = append(table, backends[i])
	}

	return table
}

func (s *service) key(at string) maps.FrontendKey {
	a := netip.MustParseAddrPort(at)
	proto := protocol(s.proto)
	if a.Port() == 0 {
		proto = 0
	}

	return maps.FrontendKeyOf(a.Addr(), a.Port(), proto, maps.ScopeInternal)
}

func (s *service) frontend() maps.Frontend {
	return maps.Frontend{
		Id: s.id, SlotBase: s.slotBase, SlotCount: s.slotCount, TableSize: uint32(len(s.table)),
		AffinitySeconds: s.affinity, Flags: s.flags, Kind: maps.KindClusterIP, Algorithm: s.algorithm,
	}
}

// forget removes backends from the backends map.
func (w *world) forget(t testing.TB, backends ...uint32) {
	t.Helper()
	for _, id := range backends {
		must(t, w.Maps().Backends.Delete(id))
	}
}

// without returns the backends of s but one.
func (s *service) without(backend uint32) []uint32 {
	return slices.DeleteFunc(slices.Clone(s.backends), func(id uint32) bool { return id == backend })
}

// nodePortsAt makes node ports answer on these addresses of the node.
func (w *world) nodePortsAt(t testing.TB, addrs ...netip.Addr) {
	t.Helper()
	for _, a := range addrs {
		w.mark(t, a, maps.AddrNodePort)
	}
}

// serviceCIDRs says where ClusterIPs come from.
func (w *world) serviceCIDRs(t testing.TB, prefixes ...string) {
	t.Helper()
	for _, prefix := range prefixes {
		must(t, w.Maps().ServiceCIDRs.Put(maps.CIDRKeyOf(netip.MustParsePrefix(prefix)), 1))
	}
}
