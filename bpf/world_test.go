package bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// place is a device at which packets pass, and a client that is there.
type place struct {
	device     string
	client     string
	class      uint32
	noEthernet bool
	bridgePort bool
}

var (
	uplink     = place{device: "eth0", client: client, class: maps.DeviceUplink}
	tunnel     = place{device: "wg0", client: "8.0.110.1:40000", class: maps.DeviceUplink, noEthernet: true}
	bridgedNIC = place{device: "nic0", client: client, class: maps.DeviceUplink, bridgePort: true}
	podVeth    = place{device: "tap0", client: "8.0.4.3:40000", class: maps.DevicePods}
	podTun     = place{device: "tun0", client: "8.0.6.3:40000", class: maps.DevicePods, noEthernet: true}
	podPort    = place{device: "port0", client: "8.0.1.9:40000", class: maps.DevicePods, bridgePort: true}
	podPortToo = place{device: "port1", client: "8.0.1.3:40000", class: maps.DevicePods, bridgePort: true}

	uplinks    = []place{uplink, tunnel, bridgedNIC}
	podPlaces  = []place{podVeth, podTun, podPort}
	everyplace = slices.Concat(uplinks, podPlaces)
	// Refusals need a real device where there is no Ethernet: a test run takes the
	// first bytes of the IP header for that of Ethernet, where an error goes and
	// whether all stations got it.
	ethernets = []place{uplink, bridgedNIC, podVeth, podPort}
)

func (p place) String() string {
	class := map[uint32]string{maps.DevicePods: "pods", maps.DeviceUplink: "uplink"}[p.class]

	return fmt.Sprintf("%s of class %s", p.device, class)
}

// world is the maps as an agent would fill them, for one family.
type world struct {
	*rig
	family  family
	options []func(*DeviceConfig)

	gsoSize  uint32 // of the packets that are run
	unsummed bool   // no device has added them up
	lenient  bool   // nor is that expected of those that go no further
	last     uint32 // id or slot in use
}

// newWorld empties the maps, and tells them what the node is. Options change how
// the programs are loaded.
func newWorld(t testing.TB, f family, options ...func(*DeviceConfig)) *world {
	t.Helper()
	w := &world{rig: mustRig(t), family: f, options: options, last: 10}
	must(t, w.empty())
	for _, addr := range []struct {
		addr   string
		device string
		flags  uint32
	}{
		{node, "eth0", maps.AddrNode | maps.AddrNodePort},
		{nodeOther, "eth1", maps.AddrNode | maps.AddrNodePort},
		{nodePrefers, "eth1", maps.AddrNode | maps.AddrNodePort},
		{"8.0.60.1:0", "wg0", maps.AddrNode | maps.AddrNodePort},
		{bridge, "br0", maps.AddrNode},
		{"8.0.4.1:0", "tap0", maps.AddrNode},
		{"8.0.6.1:0", "tun0", maps.AddrNode},
	} {
		use := maps.AddrUse{Ifindex: w.index(addr.device), Flags: addr.flags}
		must(t, w.maps.Addrs.Put(w.mapAddr(addr.addr), use))
	}
	w.putDevices(t)

	return w
}

// putDevices says what the node sends by each device.
func (w *world) putDevices(t testing.TB) {
	t.Helper()
	for device, source := range map[string]string{
		"eth0": node, "eth1": nodeOther, "eth2": "", "wg0": "8.0.60.1:0",
		"br0": bridge, "port0": "", "port1": "", "nic0": "", "tap0": "8.0.4.1:0", "tun0": "8.0.6.1:0",
	} {
		value := maps.Device{SourceV4: maps.AddrOf(netip.IPv4Unspecified())}
		if source != "" {
			value.SourceV4 = maps.AddrOf(at(source).Addr())
			value.SourceV6 = maps.AddrOf(six(at(source).Addr()))
		}
		if slices.Contains([]string{"port0", "port1", "nic0"}, device) {
			value.Bridge = w.index("br0")
		}
		must(t, w.maps.Devices.Put(w.index(device), value))
	}
}

func (w *world) index(device string) uint32 { return uint32(w.links[device].Attrs().Index) }

// mapAddr is an address of the plan as maps have it, in the family of w.
func (w *world) mapAddr(text string) maps.Addr {
	return maps.AddrOf(w.family.addr(at(text).Addr()))
}

// service is one port of a Service, as it shall be in the maps.
type service struct {
	at       []string          // what clients dial; unspecified for a node port
	proto    layers.IPProtocol // zero: TCP
	kind     uint8             // zero: ClusterIP
	to       []string          // backends; those in 8.0.1, 8.0.4, 8.0.6 and on the node itself are local
	outside  []string          // the backends of the external scope, where they are others
	flags    uint16
	affinity uint32 // seconds
	ranges   []string

	algorithm uint8
}

// published is a service that is in the maps.
type published struct {
	id       uint32
	backends map[string]uint32 // ids
	table    []string          // backends, as the table of the external scope has them
}

// serve publishes a service, in both scopes.
func (w *world) serve(t testing.TB, s service) published {
	t.Helper()
	w.last++
	p := published{id: w.last, backends: make(map[string]uint32)}
	if s.proto == 0 {
		s.proto = layers.IPProtocolTCP
	}
	if s.kind == 0 {
		s.kind = maps.KindClusterIP
	}
	if len(s.ranges) > 0 {
		s.flags |= maps.FrontendSourceRanges
	}
	for _, r := range s.ranges {
		must(t, w.maps.SourceRanges.Put(maps.SourceRangeKeyOf(p.id, w.family.prefix(r)), 1))
	}
	if s.outside == nil {
		s.outside = s.to
	}
	w.publish(t, &p, s, maps.ScopeInternal, s.to)
	w.publish(t, &p, s, maps.ScopeExternal, s.outside)

	return p
}

// publish writes the frontends of one scope, their backends first.
func (w *world) publish(t testing.TB, p *published, s service, scope uint8, to []string) {
	t.Helper()
	base := w.last + 1
	for _, backend := range to {
		id := p.backends[backend]
		if id == 0 {
			id = w.last + 1
			p.backends[backend] = id
			w.putBackend(t, *p, backend)
		}
		w.last++
		must(t, w.maps.Slots.Set(w.last, id))
	}
	w.putTable(t, p, s.algorithm, to)
	value := maps.Frontend{
		Id: p.id, SlotBase: base, SlotCount: uint32(len(to)), TableSize: uint32(len(p.table)),
		AffinitySeconds: s.affinity, Flags: s.flags, Kind: s.kind, Algorithm: s.algorithm,
	}
	if len(to) > 0 {
		value.Flags &^= maps.FrontendDropIfEmpty
	}
	for _, dialled := range s.at {
		a := w.family.addrPort(at(dialled))
		if s.kind == maps.KindClusterIP {
			w.putAddr(t, dialled, maps.AddrService)
			must(t, w.maps.Frontends.Put(maps.FrontendKeyOf(a.Addr(), 0, 0, scope), maps.Frontend{Id: p.id, Kind: s.kind}))
		} else if s.kind != maps.KindNodePort {
			w.putAddr(t, dialled, maps.AddrService)
		}
		must(t, w.maps.Frontends.Put(maps.FrontendKeyOf(a.Addr(), a.Port(), uint8(s.proto), scope), value))
	}
}

// putTable writes the table of these backends behind them, if the algorithm hashes.
func (w *world) putTable(t testing.TB, p *published, algorithm uint8, to []string) {
	t.Helper()
	p.table = nil
	if !reconcile.Hashes(algorithm) {
		return
	}
	addrs := make([]netip.AddrPort, len(to))
	for i, backend := range to {
		addrs[i] = w.family.addrPort(at(backend))
	}
	for _, i := range maglev.Table(addrs) {
		w.last++
		must(t, w.maps.Slots.Set(w.last, p.backends[to[i]]))
		p.table = append(p.table, to[i])
	}
}

// putAddr adds flags to what an address is.
func (w *world) putAddr(t testing.TB, text string, flags uint32) {
	t.Helper()
	use, _, err := w.maps.Addrs.Lookup(w.mapAddr(text))
	must(t, err)
	use.Flags |= flags
	must(t, w.maps.Addrs.Put(w.mapAddr(text), use))
}

func (w *world) putBackend(t testing.TB, p published, text string) {
	t.Helper()
	var flags uint16
	addr := at(text).Addr().As4()
	if slices.Contains([]uint8{1, 4, 6, 50, 51}, addr[2]) {
		flags = maps.BackendLocal
	}
	must(t, w.maps.Backends.Put(p.backends[text], maps.BackendOf(w.family.addrPort(at(text)), p.id, flags)))
}

// removeBackend takes a backend away; slots that name it stay.
func (w *world) removeBackend(t testing.TB, p published, text string) {
	t.Helper()
	must(t, w.maps.Backends.Delete(p.backends[text]))
}

// now is the clock of programs.
func now(t testing.TB) uint64 {
	t.Helper()
	var ts unix.Timespec
	must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))

	return uint64(ts.Nano())
}

// eachFamily runs a test in both families.
func eachFamily(t *testing.T, run func(*testing.T, family)) {
	t.Helper()
	for _, f := range families {
		t.Run("over "+f.String(), func(t *testing.T) { run(t, f) })
	}
}

// each runs a test in both families, at each of these places.
func each(t *testing.T, places []place, run func(*testing.T, *world, place), options ...func(*DeviceConfig)) {
	t.Helper()
	eachFamily(t, func(t *testing.T, f family) {
		for _, p := range places {
			t.Run("at "+p.String(), func(t *testing.T) { run(t, newWorld(t, f, options...), p) })
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
