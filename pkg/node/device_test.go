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
	state, err := list(ns.Netlink(), mustForwarding(t, ns))
	if err != nil {
		t.Fatal(err)
	}

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
	if err != nil {
		t.Fatal(err)
	}
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
	if err := ns.AddBridge("br0", netip.MustParsePrefix("10.244.1.1/24")); err != nil {
		t.Fatal(err)
	}
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "pod0", Bridge: "br0"}, lab.End{Namespace: peer, Device: "eth0"})
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "here"}, lab.End{Namespace: ns, Device: "there"})
	mustAddLink(t, ns, &netlink.Vxlan{LinkAttrs: named("flannel.1"), VxlanId: 1, Port: 8472})
	mustAddLink(t, ns, &netlink.Vxlan{LinkAttrs: named("any.1"), FlowBased: true, Port: 8473})
	mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named("ifb0")})
	mustTun(t)
	mustAddLink(t, ns, &netlink.Tuntap{LinkAttrs: named("tap0"), Mode: netlink.TUNTAP_MODE_TAP})
	mustAddLink(t, ns, &netlink.Tuntap{LinkAttrs: named("tun0"), Mode: netlink.TUNTAP_MODE_TUN})
	below, err := ns.Netlink().LinkByName("here")
	if err != nil {
		t.Fatal(err)
	}
	onHere := named("macvlan0")
	onHere.ParentIndex = below.Attrs().Index
	mustAddLink(t, ns, &netlink.Macvlan{LinkAttrs: onHere, Mode: netlink.MACVLAN_MODE_BRIDGE})

	devices := mustList(t, ns)
	want := map[string]Device{
		"lo":        {LinkLayer: LinkOther, IsLoopback: true, IsUp: true},
		"br0":       {Kind: "bridge", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Network: netip.MustParsePrefix("10.244.1.1/24")},
		"pod0":      {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, Master: devices["br0"].Index},
		"here":      {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Peer: devices["there"].Index},
		"there":     {Kind: "veth", LinkLayer: LinkEthernet, IsUp: true, TakesFrames: true, Peer: devices["here"].Index},
		"flannel.1": {Kind: "vxlan", LinkLayer: LinkEthernet, TakesFrames: true},
		"any.1":     {Kind: "vxlan", LinkLayer: LinkEthernet},
		"ifb0":      {Kind: "ifb", LinkLayer: LinkEthernet},
		"tap0":      {Kind: "tun", LinkLayer: LinkEthernet},
		"tun0":      {Kind: "tun", LinkLayer: LinkIP},
		"macvlan0":  {Kind: "macvlan", LinkLayer: LinkEthernet, TakesFrames: true},
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	if err := ns.Netlink().LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
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
			if err := ns.SetUp("eth0"); err != nil {
				t.Fatal(err)
			}
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
