package devices

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestTwoUplinks has requests come by one uplink and answers leave by the other:
//
//	client  eth0 192.168.50.100 ◀── answer ── eth0 ┐ node-1 ─┬─ pod-1-1, node-1
//	        eth1 192.168.51.100 ── request ─▶ eth1 ┘         └─ pod-2-0, node-2
//
// and the other way round. The way there is not checked.
func TestTwoUplinks(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450, SecondUplink: true, Attachment: lab.Routed},
		filter: looseCNI,
	})
	for _, node := range w.Nodes {
		lab.Must(t, node.Sysctl("net/ipv4/conf/all/rp_filter", "2"))
	}
	c := casesOf(w)
	w.start(t, c.services()...)
	caller, first := w.outside(t), w.Nodes[0]
	eth0 := [2]netip.Addr{first.IPv4, first.IPv6}
	eth1 := [2]netip.Addr{first.SecondIPv4, first.SecondIPv6}
	clientEth0 := [2]netip.Addr{w.Client.IPv4, w.Client.IPv6}
	clientEth1 := [2]netip.Addr{w.Client.SecondIPv4, w.Client.SecondIPv6}

	for _, test := range []struct {
		name     string
		to, from [2]netip.Addr
	}{
		{"in by the second, out by the first", eth1, clientEth0},
		{"in by the first, out by the second", eth0, clientEth1},
		{"in and out by the second", eth1, clientEth1},
	} {
		for _, to := range []service{c.local, c.remote, c.host, c.remoteHost} {
			seen := test.from
			if b := to.backends[0]; b.node != first.Name {
				seen = sourcesTo(t, first, b)
			}
			t.Run(fmt.Sprintf("%s, to %s", test.name, to.backends[0].name), func(t *testing.T) {
				for _, f := range families {
					for _, network := range networks {
						reply, err := caller.Exchange(lab.Exchange{
							Network: network,
							Address: netip.AddrPortFrom(test.to[f], to.nodePort()).String(),
							From:    netip.AddrPortFrom(test.from[f], 0).String(),
							Timeout: dialTimeout,
						})
						if err == nil {
							err = expect(reply, to.backends[0].name, seen[f])
						}
						if err != nil {
							t.Errorf("%s, %s: %v", f, network, err)
						}
					}
				}
			})
		}
	}
}

// TestRepliesByTheDeviceOfTheClient gives addresses routes of their own, as VPC CNIs do, and has
// the client drop what comes by another device than that of the address it has dialed, as such a
// network does.
//
//	far client  eth0 ◀══════▶ eth0 ┐ node-1 ─┬─ pod-1-1, node-1
//	            eth1 ◀══════▶ eth1 ┘         └─ pod-2-0, node-2
func TestRepliesByTheDeviceOfTheClient(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		dialed func(*lab.Node) [2]netip.Addr
		from   func(*lab.Node) [2]netip.Addr // has the way by the second uplink
	}{
		{"pods have a way of their own", func(n *lab.Node) [2]netip.Addr { return [2]netip.Addr{n.IPv4, n.IPv6} },
			func(n *lab.Node) [2]netip.Addr { return podIPs(n.Pods[1]) }},
		{"an address of the node has a way of its own", secondIPs, secondIPs},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{OverlayMTU: 1450, SecondUplink: true, Attachment: lab.Routed},
				filter: looseCNI,
			})
			far := w.leadBack(t, test.from)
			c := casesOf(w)
			w.start(t, c.services()...)
			w.mustReplyTo(t, far, test.dialed, c)
		})
	}
}

func secondIPs(n *lab.Node) [2]netip.Addr { return [2]netip.Addr{n.SecondIPv4, n.SecondIPv6} }

// leadBack gives addresses of node-1 a way by the second uplink, and returns those of a client far behind both, which
// drops what comes by another device than that of the address.
func (w *world) leadBack(t *testing.T, from func(*lab.Node) [2]netip.Addr) (far [2]netip.Addr) {
	t.Helper()
	far = [2]netip.Addr{netip.MustParseAddr("198.18.0.1"), netip.MustParseAddr("fd00:18::1")}
	first := w.Nodes[0]
	for _, node := range w.Nodes {
		lab.Must(t, node.Sysctl("net/ipv4/conf/all/rp_filter", "2"))
	}
	gateway, second := hostIPs(w.Client), [2]netip.Addr{w.Client.SecondIPv4, w.Client.SecondIPv6}
	lab.Must(t, w.Client.SetUp("lo"), w.Client.Netfilter(oneDeviceEach(first)))
	for _, f := range families {
		lab.Must(t,
			w.Client.AddAddress("lo", netip.PrefixFrom(far[f], far[f].BitLen())),
			first.AddRoute(netip.PrefixFrom(far[f], far[f].BitLen()), gateway[f]),
			routeFrom(first, from(first)[f], second[f]))
	}

	return far
}

// mustReplyTo has that client dial addresses of node-1.
func (w *world) mustReplyTo(t *testing.T, far [2]netip.Addr, dialed func(*lab.Node) [2]netip.Addr, c *cases) {
	t.Helper()
	first, caller := w.Nodes[0], w.outside(t)
	for _, to := range []service{c.local, c.remote, c.host, c.remoteHost} {
		t.Run("to "+to.backends[0].name, func(t *testing.T) {
			for _, f := range families {
				for _, network := range networks {
					reply, err := caller.Exchange(lab.Exchange{
						Network: network,
						Address: netip.AddrPortFrom(dialed(first)[f], to.nodePort()).String(),
						From:    netip.AddrPortFrom(far[f], 0).String(),
						Timeout: dialTimeout,
					})
					seen := far[f]
					if b := to.backends[0]; b.node != first.Name {
						seen = sourcesTo(t, first, b)[f]
					}
					if err == nil {
						err = expect(reply, to.backends[0].name, seen)
					}
					if err != nil {
						t.Errorf("%s, %s: %v", f, network, err)
					}
				}
			}
		})
	}
}

// oneDeviceEach is a firewall that takes from each address of a node only what comes by its device.
func oneDeviceEach(node *lab.Node) string {
	return fmt.Sprintf(`table inet vpc {
		chain prerouting {
			type filter hook prerouting priority raw
			iifname != "eth0" ip saddr %s drop
			iifname != "eth0" ip6 saddr %s drop
			iifname != "eth1" ip saddr %s drop
			iifname != "eth1" ip6 saddr %s drop
		}
	}`, node.IPv4, node.IPv6, node.SecondIPv4, node.SecondIPv6)
}

// routeFrom gives what a node sends or passes on from an address a default route of its own, by its
// second uplink.
func routeFrom(node *lab.Node, from, via netip.Addr) error {
	rule := netlink.NewRule()
	rule.Src = &net.IPNet{IP: from.AsSlice(), Mask: net.CIDRMask(from.BitLen(), from.BitLen())}

	return routeBy(node, rule, via)
}

// routeBy gives what a rule of routing selects on a node a default route of its own, by its second uplink.
func routeBy(node *lab.Node, rule *netlink.Rule, via netip.Addr) error {
	const table = 51
	h := node.Netlink()
	eth1, err := h.LinkByName("eth1")
	if err != nil {
		return err
	}
	rule.Table, rule.Priority = table, 100
	if err := h.RuleAdd(rule); err != nil {
		return err
	}
	zero := make(net.IP, via.BitLen()/8)

	return h.RouteAdd(&netlink.Route{
		LinkIndex: eth1.Attrs().Index, Table: table, Gw: via.AsSlice(), Dst: &net.IPNet{IP: zero, Mask: net.CIDRMask(0, via.BitLen())},
	})
}
