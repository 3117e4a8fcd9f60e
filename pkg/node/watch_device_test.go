package node

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
)

// untilDevice waits until a device, which may be missing, fulfils a condition.
func (o observer) untilDevice(name, what string, is func(d Device, there bool) bool) {
	o.t.Helper()
	o.until(name+" "+what, func(state State) bool {
		d, there := byName(state)[name]

		return is(d, there)
	})
}

func TestWatchReportsDevices(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	watch := mustWatch(t, ns, Config{})
	watch.untilDevice("lo", "there", func(_ Device, there bool) bool { return there })

	lab.MustVeth(t, lab.End{Namespace: ns, Device: "eth0"}, lab.End{Namespace: peer, Device: "eth0"})
	watch.untilDevice("eth0", "there", func(d Device, there bool) bool { return there && d.IsUp && d.Peer == 0 })

	mustAdd(t, ns, "eth0", "192.168.50.1/24")
	watch.untilDevice("eth0", "with a network", func(d Device, _ bool) bool {
		return d.Network == netip.MustParsePrefix("192.168.50.1/24") && d.SourceV4 == d.Network.Addr()
	})
	mustRoute(t, ns, "0.0.0.0/0", "eth0", "192.168.50.254")
	watch.untilDevice("eth0", "with a gateway", func(d Device, _ bool) bool { return d.Gateway.IsValid() })
	if err := ns.Netlink().RouteDel(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0"))}); err != nil {
		t.Fatal(err)
	}
	watch.untilDevice("eth0", "without a gateway", func(d Device, _ bool) bool { return !d.Gateway.IsValid() })
	mustRoute(t, ns, "::/0", "eth0", "fe80::1")
	watch.untilDevice("eth0", "with a gateway", func(d Device, _ bool) bool { return d.Gateway.IsValid() })
	mustRemove(t, ns, "eth0", "192.168.50.1/24")
	watch.untilDevice("eth0", "without a network", func(d Device, _ bool) bool { return !d.Network.IsValid() })

	if err := ns.AddBridge("br0"); err != nil {
		t.Fatal(err)
	}
	link, err := ns.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	bridge, err := ns.Netlink().LinkByName("br0")
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []error{ns.Netlink().LinkSetMaster(link, bridge), ns.SetDown("eth0"), ns.Netlink().LinkSetName(link, "uplink")} {
		if change != nil {
			t.Fatal(change)
		}
	}
	watch.untilDevice("uplink", "below a bridge, and down", func(d Device, _ bool) bool {
		return d.Master == bridge.Attrs().Index && !d.IsUp
	})
	if err := ns.RemoveDevice("uplink"); err != nil {
		t.Fatal(err)
	}
	watch.untilDevice("uplink", "gone", func(_ Device, there bool) bool { return !there })
}

// The peer of a pair goes to another namespace, and comes back.
func TestWatchReportsThePeer(t *testing.T) {
	ns, pod := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "pod")
	watch := mustWatch(t, ns, Config{})
	lab.MustVeth(t, lab.End{Namespace: ns, Device: "veth0"}, lab.End{Namespace: ns, Device: "veth1"})
	watch.untilDevice("veth0", "with its peer here", func(d Device, _ bool) bool { return d.Peer != 0 })
	move := func(from, to *lab.Namespace) {
		t.Helper()
		link, err := from.Netlink().LinkByName("veth1")
		if err == nil {
			err = from.Netlink().LinkSetNsFd(link, int(to.Handle()))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	move(ns, pod)
	watch.untilDevice("veth0", "with its peer elsewhere", func(d Device, _ bool) bool { return d.Peer == 0 })
	move(pod, ns)
	watch.untilDevice("veth0", "with its peer here again", func(d Device, _ bool) bool { return d.Peer != 0 })
}

func TestWatchReportsABurstOfDevicesTogether(t *testing.T) {
	ns, peer := lab.MustNamespace(t, "node"), lab.MustNamespace(t, "peer")
	watch := mustWatch(t, ns, Config{})
	const count = 100
	start := time.Now()
	for i := range count {
		name := fmt.Sprintf("veth%d", i)
		lab.MustVeth(t, lab.End{Namespace: ns, Device: name}, lab.End{Namespace: peer, Device: name})
	}
	burst := time.Since(start)
	updates := 0
	watch.until("complete list", func(state State) bool {
		updates++
		up := 0
		for _, d := range state.Devices {
			if d.Kind == "veth" && d.IsUp && d.SourceV6 == (netip.Addr{}) {
				up++
			}
		}

		return up == count
	})
	if most := int(burst/quietTime) + 3; updates > most {
		t.Errorf("reported %d times in %v, want at most %d", updates, burst, most)
	}
}
