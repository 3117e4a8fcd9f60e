package node

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// newSourceNode returns a node with two uplinks, whose addresses have all states
// that an address can have, and with devices that have none.
func newSourceNode(t *testing.T) *lab.Namespace {
	t.Helper()
	ns := lab.MustNamespace(t, "node")
	for _, name := range []string{"eth0", "eth1", "bare"} {
		mustAddLink(t, ns, &netlink.Ifb{LinkAttrs: named(name)})
		if err := ns.SetUp(name); err != nil {
			t.Fatal(err)
		}
	}
	if err := ns.Sysctl("net/ipv6/conf/eth1/use_tempaddr", "1"); err != nil {
		t.Fatal(err)
	}
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
