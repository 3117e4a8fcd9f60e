package devices

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestMovedConnection has the router lead a virtual address to another node, as it does when a node is lost: the
// connections that the first node has translated are reset at once, and what forgers send does not multiply, although
// the router leads it back to the node.
//
//	client ──▶ router ─┬─▶ node-1
//	             ▲     └─▶ node-2, from the change on
//	             └───────── the default route of both
func TestMovedConnection(t *testing.T) {
	t.Parallel()
	for name, filter := range map[string]string{"nothing is tracked": "", "netfilter tracks connections": bridgeCNI} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: filter})
			s := service{number: 43, backends: []backend{onPod(w.Nodes[0].Pods[0]), onPod(w.Nodes[1].Pods[0])}}
			w.start(t, s)
			for _, f := range families {
				for _, way := range []way{loadBalancer, clusterIP} {
					t.Run(fmt.Sprintf("%s of %s", way, f), func(t *testing.T) {
						w.leadTo(t, w.Nodes[0])
						to := s.at(way, f, nil)
						var talks []*talk
						for range 20 {
							conn, err := w.Client.Dial("tcp", to, dialTimeout)
							lab.Must(t, err)
							defer conn.Close()
							talks = append(talks, newTalk(conn))
							lab.Must(t, talks[len(talks)-1].ask("who"))
						}
						w.leadTo(t, w.Nodes[1])
						begin := time.Now()
						for i, talk := range talks {
							if err := talk.ask("who"); lab.Errno(err) != unix.ECONNRESET {
								t.Errorf("connection %d: %v, want a reset", i, err)
								break // the others would hang as long
							}
						}
						if took := time.Since(begin); took > time.Second {
							t.Errorf("the resets took %v", took)
						}
						w.mustNotMultiply(t, netip.MustParseAddrPort(to), f)
					})
				}
			}
		})
	}
}

// mustNotMultiply sends forged segments to an address that the router leads to node-2, which would lead it back.
func (w *world) mustNotMultiply(t *testing.T, to netip.AddrPort, f family) {
	t.Helper()
	const forged = 200
	node := w.Nodes[1]
	for _, sysctl := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		lab.Must(t, w.Uplink.Sysctl(sysctl, "1"))
		defer func() { lab.Must(t, w.Uplink.Sysctl(sysctl, "0")) }()
	}
	lab.Must(t, w.Uplink.Sysctl("net/ipv4/conf/br0/send_redirects", "0"))
	for _, prefix := range virtualPrefixes {
		via := node.IPv4
		if prefix.Addr().Is6() {
			via = node.IPv6
		}
		lab.Must(t, w.Uplink.AddRoute(prefix, via))
	}
	link, err := node.Netlink().LinkByName("eth0")
	lab.Must(t, err)
	packets := func() uint64 {
		link, err = node.Netlink().LinkByIndex(link.Attrs().Index)
		lab.Must(t, err)

		return link.Attrs().Statistics.RxPackets
	}
	before := packets()
	source := netip.AddrPortFrom(hostIPs(w.Client)[f], 777)
	lab.Must(t, forge(w.Client.Namespace, source, to, func(send func(layers.TCP) error) error {
		for range forged {
			if err := send(layers.TCP{ACK: true}); err != nil {
				return err
			}
		}

		return nil
	}))
	time.Sleep(500 * time.Millisecond) // some loops
	if got := packets() - before; got > forged+50 {
		t.Errorf("%d forged segments have become %d packets", forged, got)
	}
}
