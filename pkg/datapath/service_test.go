package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/test/lab"
)

// service is one service port, written into the maps by hand.
type service struct {
	proto     string   // tcp or udp
	at        []string // its frontends; port 0 is a catch-all, 0.0.0.0 a node port
	to        []string // its backends
	affinity  uint32   // seconds
	flags     uint16   // of its pools
	algorithm uint8
	ranges    []string // source ranges
	id        uint32   // of the service port: given by add, or kept
	backends  []uint32 // ids
	table     []uint32 // of backends, if the algorithm hashes
}

func protocol(name string) uint8 {
	return map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP}[name]
}

// add publishes a service, from the bottom up.
func (w *world) add(t testing.TB, s service) *service {
	t.Helper()
	var err error
	if s.id == 0 {
		s.id, err = w.hand().ServicePort()
		lab.Must(t, err)
	}
	for _, to := range s.to {
		id, err := w.hand().Backend(s.id, netip.MustParseAddrPort(to), 0)
		lab.Must(t, err)
		s.backends = append(s.backends, id)
	}
	for _, prefix := range s.ranges {
		s.flags |= maps.PoolSourceRanges
		lab.Must(t, w.Maps().SourceRanges.Put(maps.SourceRangeKeyOf(s.id, netip.MustParsePrefix(prefix)), 1))
	}
	w.publish(t, &s, s.backends...)

	return &s
}

// hand returns the writer of this world's maps.
func (w *world) hand() *mapstest.Writer {
	if w.writer == nil {
		w.writer = mapstest.New(w.Maps().Tables)
	}

	return w.writer
}

// publish gives a service a new pool of these backends.
func (w *world) publish(t testing.TB, s *service, backends ...uint32) {
	t.Helper()
	s.table = s.newTable(backends)
	pool, err := w.hand().Pool(maps.Pool{
		ServicePortId: s.id, AffinitySeconds: s.affinity, Flags: s.flags, Algorithm: s.algorithm,
	}, backends, s.table)
	lab.Must(t, err)
	for _, at := range s.at {
		if a := netip.MustParseAddrPort(at).Addr(); !a.IsUnspecified() {
			w.mark(t, a, maps.AddrService)
		}
		lab.Must(t, w.hand().Frontend(s.key(at), maps.KindClusterIP, pool))
	}
}

// mark sets a flag of an address.
func (w *world) mark(t testing.TB, a netip.Addr, flag uint32) {
	t.Helper()
	lab.Must(t, w.hand().Mark(maps.AddrOf(a), flag, 0))
}

// newTable returns the table of these backends, nil if the algorithm needs none.
func (s *service) newTable(backends []uint32) []uint32 {
	if !maps.Hashes(s.algorithm) {
		return nil
	}
	addrs := make([]netip.AddrPort, len(backends))
	for i, id := range backends {
		addrs[i] = netip.MustParseAddrPort(s.to[slices.Index(s.backends, id)])
	}
	var table []uint32
	for _, i := range maglev.Table(addrs, maglev.DefaultSize) {
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

// forget removes backends from the backends map.
func (w *world) forget(t testing.TB, backends ...uint32) {
	t.Helper()
	for _, id := range backends {
		lab.Must(t, w.hand().RemoveBackend(id))
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

// serviceCIDRs publishes the ranges of ClusterIPs.
func (w *world) serviceCIDRs(t testing.TB, prefixes ...string) {
	t.Helper()
	for _, prefix := range prefixes {
		lab.Must(t, mapstest.New(w.Maps().Tables).ServiceCIDR(netip.MustParsePrefix(prefix)))
	}
}
