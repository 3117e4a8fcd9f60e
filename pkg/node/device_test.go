package node

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustList returns the devices of a namespace, by name.
func mustList(t testing.TB, ns *lab.Namespace) map[string]Device {
	t.Helper()
	state, err := mustReader(t, ns).read()
	lab.Must(t, err)

	return byName(state)
}

func byName(state State) map[string]Device {
	devices := make(map[string]Device)
	for _, d := range state.Devices {
		devices[d.Name] = d
	}

	return devices
}

func mustAddLink(t testing.TB, ns *lab.Namespace, link netlink.Link) {
	t.Helper()
	// For a tap, the thread has to be there.
	if err := ns.Do(func() error { return netlink.LinkAdd(link) }); err != nil {
		t.Fatalf("add %s %s: %v", link.Type(), link.Attrs().Name, err)
	}
}

// mustTun makes /dev/net/tun where udev has not.
func mustTun(t testing.TB) {
	t.Helper()
	err := os.MkdirAll("/dev/net", 0o755)
	if err == nil {
		err = unix.Mknod("/dev/net/tun", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 200)))
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
}

func named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name

	return attrs
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// mustRoute adds a route to a prefix by a device, without a gateway if that is
// empty.
func mustRoute(t testing.TB, ns *lab.Namespace, to, device, gateway string, change ...func(*netlink.Route)) {
	t.Helper()
	link, err := ns.Netlink().LinkByName(device)
	lab.Must(t, err)
	dst := netip.MustParsePrefix(to)
	route := &netlink.Route{Dst: ipNet(dst), LinkIndex: link.Attrs().Index, Flags: int(netlink.FLAG_ONLINK)}
	if gateway != "" {
		route.Gw = netip.MustParseAddr(gateway).AsSlice()
	} else {
		route.Flags, route.Scope = 0, netlink.SCOPE_LINK
	}
	for _, f := range change {
		f(route)
	}
	if err := ns.Netlink().RouteAdd(route); err != nil {
		t.Fatalf("route to %s by %s: %v", to, device, err)
	}
}

// Each kind of device is listed with its properties.
func TestDevices(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	lab.Must(t, ns.AddBridge("br0", netip.MustParsePrefix("10.244.1.1/24")))
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "pod0", Bridge: "br0"}, lab.End{Namespace: peer, Device: "eth0"})
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "here"}, lab.End{Namespace: ns, Device: "there"})
	mustAddLink(t, ns, &netlink.Vxlan{LinkAttrs: named("flannel.1"), VxlanId: 1, Port: 8472})
	mustAddLink(t, ns, &netlink.Vxlan{LinkAttrs: named("any.1"), FlowBased: true, Port: 8473})
	mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named("ifb0")})
	mustTun(t)
	mustAddLink(t, ns, &netlink.Tuntap{LinkAttrs: named("tap0"), Mode: netlink.TUNTAP_MODE_TAP})
	mustAddLink(t, ns, &netlink.Tuntap{LinkAttrs: named("tun0"), Mode: netlink.TUNTAP_MODE_TUN})
	below, err := ns.Netlink().LinkByName("here")
	lab.Must(t, err)
	onHere := named("macvlan0")
	onHere.ParentIndex = below.Attrs().Index
	mustAddLink(t, ns, &netlink.Macvlan{LinkAttrs: onHere, Mode: netlink.MACVLAN_MODE_BRIDGE})

	devices := mustList(t, ns)
	want := map[string]Device{
		"lo":        {LinkLayer: LinkOther, IsLoopback: true, IsUp: true},
		"br0":       {Kind: "bridge", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Network: netip.MustParsePrefix("10.244.1.1/24")},
		"pod0":      {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, Master: devices["br0"].Index, PeerNetns: 1},
		"here":      {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Peer: devices["there"].Index},
		"there":     {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Peer: devices["here"].Index},
		"flannel.1": {Kind: "vxlan", LinkLayer: LinkEthernet, TakesFrames: true},
		"any.1":     {Kind: "vxlan", LinkLayer: LinkEthernet},
		"ifb0":      {Kind: "ifb", LinkLayer: LinkEthernet},
		"tap0":      {Kind: "tun", LinkLayer: LinkEthernet},
		"tun0":      {Kind: "tun", LinkLayer: LinkIP},
		"macvlan0":  {Kind: "macvlan", LinkLayer: LinkEthernet, TakesFrames: true, Lower: devices["here"].Index},
	}
	for name, d := range want {
		d.Name = name
		want[name] = d
	}
	ignore := cmpopts.IgnoreFields(Device{}, "Index", "SourceV4", "SourceV6")
	if diff := cmp.Diff(want, devices, ignore, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// Some addresses make a network.
func TestNetworkOfADevice(t *testing.T) {
	for _, test := range []struct {
		name  string
		add   []string // addresses
		scope netlink.Scope
		want  string
	}{
		{"one of IPv4", []string{"192.168.50.1/24"}, 0, "192.168.50.1/24"},
		{"one of IPv6", []string{"fd00:50::1/64"}, 0, "fd00:50::1/64"},
		{"not a whole address", []string{"10.244.1.1/32", "fd00::1/128"}, 0, ""},
		{"the one that is, behind a whole address", []string{"10.244.1.1/32", "10.1.0.1/31"}, 0, "10.1.0.1/31"},
		{"not a link-local one", []string{"169.254.1.1/16", "fe80::1/64"}, 0, ""},
		{"not one of another scope", []string{"192.168.50.1/24"}, netlink.SCOPE_LINK, ""},
		{"not a single peer", []string{"10.0.0.1/32 peer 10.0.0.2/32"}, 0, ""},
		{"a network of peers", []string{"10.0.0.1/32 peer 10.0.0.2/24"}, 0, "10.0.0.1/24"},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named("eth0")})
			for _, text := range test.add {
				mustAddr(t, ns, "eth0", text, func(a *netlink.Addr) { a.Scope = int(test.scope) })
			}
			got := ""
			if network := mustList(t, ns)["eth0"].Network; network.IsValid() {
				got = network.String()
			}
			if got != test.want {
				t.Errorf("network is %q, want %q", got, test.want)
			}
		})
	}
}

// mustAddr adds an address: "10.0.0.1/24", or "10.0.0.1/32 peer 10.0.0.2/24".
func mustAddr(t testing.TB, ns *lab.Namespace, device, text string, change ...func(*netlink.Addr)) {
	t.Helper()
	text, peer, _ := strings.Cut(text, " peer ")
	addr, err := netlink.ParseAddr(text)
	lab.Must(t, err)
	if peer != "" {
		if addr.Peer, err = netlink.ParseIPNet(peer); err != nil {
			t.Fatal(err)
		}
	}
	if addr.IP.To4() == nil {
		addr.Flags |= unix.IFA_F_NODAD
	}
	for _, f := range change {
		f(addr)
	}
	link, err := ns.Netlink().LinkByName(device)
	lab.Must(t, err)
	lab.Must(t, ns.Netlink().LinkSetUp(link))
	if err := ns.Netlink().AddrAdd(link, addr); err != nil {
		t.Fatalf("address %s: %v", text, err)
	}
}

// Some routes lead to a gateway.
func TestGatewayOfADevice(t *testing.T) {
	for _, test := range []struct {
		name string
		add  func(*testing.T, *lab.Namespace)
		want string
	}{
		{"that of the default route", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "0.0.0.0/0", "eth0", "192.0.2.1")
		}, "192.0.2.1"},
		{"that of another route", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "10.244.2.0/24", "eth0", "192.0.2.1")
		}, "192.0.2.1"},
		{"one of IPv6", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "::/0", "eth0", "fe80::1")
		}, "fe80::1"},
		{"none where a route goes by the device itself", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "10.244.1.7/32", "eth0", "")
		}, ""},
		{"none in another table", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "0.0.0.0/0", "eth0", "192.0.2.1", func(r *netlink.Route) { r.Table = 100 })
		}, ""},
		{"none that is the node itself", func(t *testing.T, ns *lab.Namespace) {
			mustAddr(t, ns, "eth0", "10.0.0.215/32")
			mustRoute(t, ns, "10.0.0.0/24", "eth0", "10.0.0.215", func(r *netlink.Route) { r.Flags = 0 })
		}, ""},
		{"one of several hops", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "0.0.0.0/0", "eth0", "", func(r *netlink.Route) {
				r.MultiPath = []*netlink.NexthopInfo{
					{LinkIndex: r.LinkIndex, Gw: netip.MustParseAddr("192.0.2.7").AsSlice(), Flags: int(netlink.FLAG_ONLINK)},
					{LinkIndex: r.LinkIndex, Gw: netip.MustParseAddr("192.0.2.8").AsSlice(), Flags: int(netlink.FLAG_ONLINK)},
				}
				r.LinkIndex, r.Scope = 0, 0
			})
		}, "192.0.2.7"},
		{"one of the other family", func(t *testing.T, ns *lab.Namespace) {
			mustRoute(t, ns, "0.0.0.0/0", "eth0", "", func(r *netlink.Route) {
				r.Via = &netlink.Via{AddrFamily: unix.AF_INET6, Addr: netip.MustParseAddr("fe80::9").AsSlice()}
				r.Flags, r.Scope = int(netlink.FLAG_ONLINK), 0
			})
		}, "fe80::9"},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			ns := lab.MustNamespace(t, "node")
			mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named("eth0")})
			lab.Must(t, ns.SetUp("eth0"))
			test.add(t, ns)
			got := ""
			if gateway := mustList(t, ns)["eth0"].Gateway; gateway.IsValid() {
				got = gateway.String()
			}
			if got != test.want {
				t.Errorf("gateway is %q, want %q", got, test.want)
			}
		})
	}
}

// newSourceNode returns a node with two uplinks, whose addresses have all states
// that an address can have, and with devices that have none.
func newSourceNode(t *testing.T) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, "node")
	for _, name := range []string{"eth0", "eth1", "bare"} {
		mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named(name)})
		lab.Must(t, ns.SetUp(name))
	}
	lab.Must(t, ns.Sysctl("net/ipv6/conf/eth1/use_tempaddr", "1"))
	temporary := func(a *netlink.Addr) { a.Flags |= unix.IFA_F_MANAGETEMPADDR } // makes another one
	old := func(a *netlink.Addr) { a.PreferedLft, a.ValidLft = 0, 1000 }

	mustAddr(t, ns, "eth0", "169.254.7.7/16")
	mustAddr(t, ns, "eth0", "192.168.77.9/24", func(a *netlink.Addr) { a.Scope = unix.RT_SCOPE_LINK })
	mustAddr(t, ns, "eth0", "192.168.50.1/24")
	mustAddr(t, ns, "eth0", "192.168.50.2/24") // secondary
	mustAddr(t, ns, "eth0", "10.9.9.9/32")
	mustAddr(t, ns, "eth1", "10.1.0.1/24")

	// The kernel prefers the latest address.
	mustAddr(t, ns, "eth0", "fd00:50::1/64")
	mustAddr(t, ns, "eth0", "fd00:50::2/64", old)
	mustAddr(t, ns, "eth1", "fd00:51::1/64")
	mustAddr(t, ns, "eth1", "fd00:51::2/64", temporary)
	mustAddr(t, ns, "eth1", "fd00:51::3/64", old)

	return ns
}

func wantSources(t *testing.T, ns *lab.Namespace, want map[string][2]string) {
	t.Helper()
	devices := mustList(t, ns)
	text := func(a netip.Addr) string {
		if !a.IsValid() {
			return ""
		}

		return a.String()
	}
	for name, sources := range want {
		got := [2]string{text(devices[name].SourceV4), text(devices[name].SourceV6)}
		if got != sources {
			t.Errorf("%s sends from %q, want %q", name, got, sources)
		}
	}
}

func TestSources(t *testing.T) {
	ns := newSourceNode(t)
	wantSources(t, ns, map[string][2]string{
		"eth0": {"192.168.50.1", "fd00:50::1"},
		"eth1": {"10.1.0.1", "fd00:51::2"},
		"bare": {"192.168.50.1", "fd00:50::1"}, // the first
		"lo":   {"192.168.50.1", "fd00:50::1"},
	})

	t.Run("those of the default route, without own ones", func(t *testing.T) {
		mustRoute(t, ns, "0.0.0.0/0", "eth1", "10.1.0.254")
		mustRoute(t, ns, "0.0.0.0/0", "eth0", "192.168.50.254", func(r *netlink.Route) { r.Priority = 100 })
		mustRoute(t, ns, "::/0", "eth1", "fd00:51::254")
		wantSources(t, ns, map[string][2]string{
			"eth0": {"192.168.50.1", "fd00:50::1"},
			"bare": {"10.1.0.1", "fd00:51::2"},
		})
	})
	t.Run("that which the default route names", func(t *testing.T) {
		mustAddr(t, ns, "lo", "10.7.7.7/32")
		if err := ns.Netlink().RouteReplace(&netlink.Route{
			Gw: netip.MustParseAddr("10.1.0.254").AsSlice(), Src: netip.MustParseAddr("10.7.7.7").AsSlice(),
		}); err != nil {
			t.Fatal(err)
		}
		wantSources(t, ns, map[string][2]string{"eth1": {"10.1.0.1", "fd00:51::2"}, "bare": {"10.7.7.7", "fd00:51::2"}})
	})
}

func TestSourcesOfANodeWithout(t *testing.T) {
	wantSources(t, lab.MustNamespace(t, "node"), map[string][2]string{"lo": {}})
}

// The sources are those that the kernel selects towards a neighbour by each device.
func TestSourcesAreTheKernels(t *testing.T) {
	ns := newSourceNode(t)
	devices := mustList(t, ns)
	for device, neighbours := range map[string][]string{
		"eth0": {"192.168.50.77", "fd00:50::77"},
		"eth1": {"10.1.0.77", "fd00:51::77"},
	} {
		for _, neighbour := range neighbours {
			to := netip.MustParseAddr(neighbour)
			routes, err := ns.Netlink().RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{Oif: device})
			if err != nil || len(routes) == 0 {
				t.Fatalf("route to %s: %v", neighbour, err)
			}
			kernels, _ := netip.AddrFromSlice(routes[0].Src)
			ours := devices[device].SourceV4
			if to.Is6() {
				ours = devices[device].SourceV6
			}
			if ours != kernels.Unmap() {
				t.Errorf("to %s by %s it is %s, the kernel takes %s", neighbour, device, ours, kernels)
			}
		}
	}
}

// A device that passes the packets of another one shows that, unless it is in another namespace.
func TestDeviceBelow(t *testing.T) {
	for _, test := range []struct {
		link netlink.Link
		want int
	}{
		{&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 7, NetNsID: -1}}, 7},
		{&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 7, NetNsID: 2}}, 0},
		{&netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 7, NetNsID: -1}}, 7},
		{&netlink.IPVlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 7, NetNsID: 0}}, 0},
		{&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: 7, NetNsID: -1}}, 0},
	} {
		if d := deviceOf(test.link); d.Lower != test.want {
			t.Errorf("%s: the device below is %d, want %d", test.link.Type(), d.Lower, test.want)
		}
	}
}
