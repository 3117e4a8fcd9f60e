package bpf

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/test/lab"
)

// place is a device at which packets pass, and a client that is there.
type place struct {
	device     string
	client     string
	class      uint32
	noEthernet bool
	bridgePort bool
	turns      bool // what leaves by uplinks need not pass the stack
}

var (
	uplink     = place{device: "eth0", client: client, class: maps.DeviceUplink}
	tunnel     = place{device: "wg0", client: "8.0.110.1:40000", class: maps.DeviceUplink, noEthernet: true}
	bridgedNIC = place{device: "nic0", client: client, class: maps.DeviceUplink, bridgePort: true}
	podVeth    = place{device: "tap0", client: "8.0.4.3:40000", class: maps.DevicePods}
	podTun     = place{device: "tun0", client: "8.0.6.3:40000", class: maps.DevicePods, noEthernet: true}
	podPort    = place{device: "port0", client: "8.0.1.9:40000", class: maps.DevicePods, bridgePort: true}
	podPortToo = place{device: "port1", client: "8.0.1.3:40000", class: maps.DevicePods, bridgePort: true}

	turning = place{device: "eth0", client: client, class: maps.DeviceUplink, turns: true}

	ways       = []place{uplink, turning}
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

	if p.turns {
		class += ", turning"
	}

	return fmt.Sprintf("%s of class %s", p.device, class)
}

// sendsAway is the verdict about a packet of a client there to a backend on another node.
func (p place) sendsAway() int32 {
	if p.turns {
		return verdictRedirect
	}

	return verdictNext
}

// world is the maps as an agent would fill them, for one family.
type world struct {
	*rig
	family  family
	options []func(*DeviceConfig)

	gsoSize  uint32 // of the packets that are run
	unsummed bool   // no device has added them up
	marked   uint32 // which bits of its mark a packet goes on with
	lenient  bool   // nor is that expected of those that go no further
	turns    bool   // some leave without passing the stack
	hand     *mapstest.Writer
}

// newWorld empties the maps, and fills them for the node. Options change how
// the programs are loaded.
func newWorld(t testing.TB, f family, options ...func(*DeviceConfig)) *world {
	t.Helper()
	w := &world{rig: mustRig(t), family: f, options: options}
	lab.Must(t, w.empty())
	w.hand = mapstest.New(w.maps.Tables)
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
		{"8.0.9.1:0", "cni0", maps.AddrNode},
	} {
		lab.Must(t, w.hand.Mark(w.mapAddr(addr.addr), addr.flags, w.index(addr.device)))
	}
	w.putDevices(t)
	t.Cleanup(func() { w.mustPassFilters(t) })

	return w
}

// mustPassFilters fails if a filter keeps packets of an entry from being looked up.
func (w *world) mustPassFilters(t testing.TB) {
	t.Helper()
	for _, e := range w.entries(t) {
		if e.key.Hook == maps.HookEgress && !w.maps.SourceFilter.May(e.key) {
			t.Errorf("packets from %s are of a flow (role %d), and the source filter lets none pass", e.key.Source(), e.flow.Role)
		}
		if port := maps.Port(e.key.DstPort); e.key.Hook == maps.HookIngress && e.flow.Role != maps.FlowFromClient && !w.maps.PortFilter.May(port) {
			t.Errorf("packets to port %d of this node are of a flow, and the port filter lets none pass", port)
		}
	}
}

// newWorldAt is newWorld, as a place wants it.
func newWorldAt(t testing.TB, p place, f family, options ...func(*DeviceConfig)) *world {
	t.Helper()
	w := newWorld(t, f, options...)
	if p.turns {
		w.turn(t, "eth0", "eth1")
	}

	return w
}

// putDevices says what the node sends by each device.
func (w *world) putDevices(t testing.TB) {
	t.Helper()
	for device, source := range map[string]string{
		"eth0": node, "eth1": nodeOther, "eth2": "", "wg0": "8.0.60.1:0",
		"br0": bridge, "port0": "", "port1": "", "nic0": "", "tap0": "8.0.4.1:0", "tun0": "8.0.6.1:0", "cni0": "8.0.9.1:0",
	} {
		value := maps.Device{SourceV4: maps.AddrOf(netip.IPv4Unspecified())}
		if source != "" {
			value.SourceV4 = maps.AddrOf(at(source).Addr())
			value.SourceV6 = maps.AddrOf(six(at(source).Addr()))
		}
		if slices.Contains([]string{"port0", "port1", "nic0"}, device) {
			value.Bridge = w.index("br0")
		}
		if slices.Contains([]string{"eth0", "eth1", "eth2", "wg0"}, device) {
			value.Flags = maps.DeviceLeadsOut
		}
		if device == "cni0" {
			value.Flags = maps.DeviceUnseen
		}
		lab.Must(t, w.maps.Devices.Put(w.index(device), value))
	}
}

// turn lets packets leave by devices without passing the stack, and by no others.
func (w *world) turn(t testing.TB, devices ...string) {
	t.Helper()
	w.turns = true
	for name := range w.links {
		device, ok, err := w.maps.Devices.Lookup(w.index(name))
		lab.Must(t, err)
		if !ok {
			continue
		}
		device.Flags &^= maps.DeviceTurns
		if slices.Contains(devices, name) {
			device.Flags |= maps.DeviceTurns
		}
		lab.Must(t, w.maps.Devices.Put(w.index(name), device))
	}
}

// isAbove has packets from the wire pass another device before this one.
func (w *world) isAbove(t testing.TB, device string) {
	t.Helper()
	value, _, err := w.maps.Devices.Lookup(w.index(device))
	lab.Must(t, err)
	value.Flags |= maps.DeviceAbove
	lab.Must(t, w.maps.Devices.Put(w.index(device), value))
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
	here     bool              // all backends are said to be on this node
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
	id, err := w.hand.ServicePort()
	lab.Must(t, err)
	p := published{id: id, backends: make(map[string]uint32)}
	if s.proto == 0 {
		s.proto = layers.IPProtocolTCP
	}
	if s.kind == 0 {
		s.kind = maps.KindClusterIP
	}
	if len(s.ranges) > 0 {
		s.flags |= maps.PoolSourceRanges
	}
	for _, r := range s.ranges {
		lab.Must(t, w.maps.SourceRanges.Put(maps.SourceRangeKeyOf(p.id, w.family.prefix(r)), 1))
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
	var ids []uint32
	for _, backend := range to {
		if p.backends[backend] == 0 {
			p.backends[backend] = w.putBackend(t, p.id, backend, s.here || !isRemote(backend))
		}
		ids = append(ids, p.backends[backend])
	}
	pool := maps.Pool{ServicePortId: p.id, AffinitySeconds: s.affinity, Flags: s.flags, Algorithm: s.algorithm}
	if len(to) > 0 {
		pool.Flags &^= maps.PoolDropIfEmpty
	}
	id, err := w.hand.Pool(pool, ids, w.newTable(p, s.algorithm, to))
	lab.Must(t, err)
	for _, vip := range s.at {
		a := w.family.addrPort(at(vip))
		if s.kind != maps.KindNodePort {
			lab.Must(t, w.hand.Mark(w.mapAddr(vip), maps.AddrService, 0))
		}
		if s.kind == maps.KindClusterIP {
			unused, err := w.hand.Pool(maps.Pool{ServicePortId: p.id}, nil, nil)
			lab.Must(t, err, w.hand.Frontend(maps.FrontendKeyOf(a.Addr(), 0, 0, scope), s.kind, unused))
		}
		lab.Must(t, w.hand.Frontend(maps.FrontendKeyOf(a.Addr(), a.Port(), uint8(s.proto), scope), s.kind, id))
	}
}

// newTable returns the table of these backends, nil if the algorithm needs none.
func (w *world) newTable(p *published, algorithm uint8, to []string) []uint32 {
	p.table = nil
	if !maps.Hashes(algorithm) {
		return nil
	}
	addrs := make([]netip.AddrPort, len(to))
	for i, backend := range to {
		addrs[i] = w.family.addrPort(at(backend))
	}
	var ids []uint32
	for _, i := range maglev.Table(addrs, maglev.DefaultSize) {
		ids = append(ids, p.backends[to[i]])
		p.table = append(p.table, to[i])
	}

	return ids
}

// putBackend publishes another backend of a service port.
func (w *world) putBackend(t testing.TB, servicePort uint32, text string, here bool) uint32 {
	t.Helper()
	var flags uint32
	if here {
		flags = maps.BackendLocal
	}
	id, err := w.hand.Backend(servicePort, w.family.addrPort(at(text)), flags)
	lab.Must(t, err)

	return id
}

// isRemote reports whether a backend is on another node.
func isRemote(backend string) bool {
	return !slices.Contains([]uint8{1, 4, 6, 50, 51}, at(backend).Addr().As4()[2])
}

// replace makes one backend the only one of what clients of the external scope dial.
func (w *world) replace(t testing.TB, vip string, proto layers.IPProtocol, pool maps.Pool, backend uint32) {
	t.Helper()
	id, err := w.hand.Pool(pool, []uint32{backend}, nil)
	key := maps.FrontendKeyOf(w.family.addr(at(vip).Addr()), at(vip).Port(), uint8(proto), maps.ScopeExternal)
	lab.Must(t, err, w.hand.Frontend(key, maps.KindClusterIP, id))
}

// removeBackend takes a backend away; slots that name it stay.
func (w *world) removeBackend(t testing.TB, p published, text string) {
	t.Helper()
	lab.Must(t, w.hand.RemoveBackend(p.backends[text]))
}

// now is the clock of programs.
func now(t testing.TB) uint64 {
	t.Helper()
	var ts unix.Timespec
	lab.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts))

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
			t.Run("at "+p.String(), func(t *testing.T) { run(t, newWorldAt(t, p, f, options...), p) })
		}
	})
}
