package devices

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestTwoUplinks has requests come by one uplink and answers leave by the other:
//
//	client  eth0 192.168.50.100 ◀── answer ── eth0 ┐ node-1 ─┬─ pod-1-1, node-1
//	        eth1 192.168.51.100 ── request ─▶ eth1 ┘         └─ pod-2-0, node-2
//
// and the other way round. Nobody checks the way there.
func TestTwoUplinks(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450, SecondUplink: true, Attachment: lab.Routed},
		filter: looseCNI,
	})
	for _, node := range w.Nodes {
		must(t, node.Sysctl("net/ipv4/conf/all/rp_filter", "2"))
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
							Timeout: patience,
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
