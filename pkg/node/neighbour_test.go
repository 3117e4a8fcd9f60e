package node

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
)

// A neighbour that has not been heard of is asked: it loses an Ethernet address that it has no longer, and one that it
// still has is confirmed.
func TestConfirmNeighbours(t *testing.T) {
	ns, pod := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "pod")
	lab.Must(t, ns.AddBridge("br0", netip.MustParsePrefix("10.244.0.1/24")))
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "port0", Bridge: "br0"},
		lab.End{Namespace: pod, Device: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix("10.244.0.2/24"), netip.MustParsePrefix("10.244.0.3/24")}})
	for name, value := range map[string]string{"delay_first_probe_time": "1", "retrans_time_ms": "100"} {
		lab.Must(t, ns.Sysctl("net/ipv4/neigh/br0/"+name, value))
	}
	bridge, err := ns.Netlink().LinkByName("br0")
	lab.Must(t, err)
	eth0, err := pod.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	index := bridge.Attrs().Index
	gone, lives := net.ParseIP("10.244.0.2"), net.ParseIP("10.244.0.3")
	for ip, mac := range map[string]net.HardwareAddr{gone.String(): {2, 0, 0, 0, 0, 99}, lives.String(): eth0.Attrs().HardwareAddr} {
		lab.Must(t, ns.Netlink().NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_STALE, IP: net.ParseIP(ip), HardwareAddr: mac}))
	}
	state := func(ip net.IP) int {
		t.Helper()
		known, err := ns.Netlink().NeighList(index, netlink.FAMILY_V4)
		lab.Must(t, err)
		for _, n := range known {
			if n.IP.Equal(ip) {
				return n.State
			}
		}

		return netlink.NUD_NONE
	}
	if before := state(gone); before != netlink.NUD_STALE {
		t.Fatalf("the neighbour is in the state %#x before", before)
	}
	lab.MustDo(t, ns, func() error { return ConfirmNeighbours([]int{index}) })
	lab.Eventually(t, "a neighbour that lives is confirmed", func() bool { return state(lives) == netlink.NUD_REACHABLE })
	lab.Eventually(t, "one with another address loses the one that is known", func() bool {
		return state(gone) == netlink.NUD_FAILED || state(gone) == netlink.NUD_NONE
	})
}
