package devices

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestUplinkBecomesAPort has an administrator put the node's uplink, one end of a veth pair as in kind, LXD and Incus,
// into a bridge that gets its addresses and routes, and back. By its looks it leads to pods then. Connections and
// exchanges of datagrams that were open go on, to backends here and on another node, through the stack or past it.
//
//	client ── eth0 (──▶ port of brex) of node-1 ─┬─ pod-1-0
//	                                             └─ node-2 ─ pod-2-0
func TestUplinkBecomesAPort(t *testing.T) {
	for _, row := range []struct{ name, attach, filter string }{
		{"by tcx, through the stack", "tcx", bridgeCNI},
		{"by clsact, through the stack", "clsact", bridgeCNI},
		{"by tcx, past the stack", "tcx", openCNI},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: row.filter, agent: []string{"--device-attach", row.attach}})
			node := w.Nodes[0]
			here := service{number: 44, backends: []backend{onPod(node.Pods[0])}}
			there := service{number: 45, backends: []backend{onPod(w.Nodes[1].Pods[0])}}
			w.start(t, here, there)
			w.mustForwardAs(t, row.filter)

			type open struct {
				*talk
				what string
			}
			var all []open
			for _, s := range []service{here, there} {
				for _, f := range families {
					for _, network := range []string{"tcp", "udp"} {
						to := s.at(nodePort, f, node)
						for range 5 {
							conn, err := w.Client.Dial(network, to, dialTimeout)
							lab.Must(t, err)
							defer conn.Close()
							all = append(all, open{newTalk(conn), fmt.Sprintf("%s to %s of %s", network, to, s.backends[0].name)})
						}
					}
				}
			}
			mustAnswerAll := func(when string) {
				t.Helper()
				for _, o := range all {
					if err := o.ask("who"); err != nil {
						t.Errorf("%s: %s: %v", when, o.what, err)
					}
				}
			}
			mustAnswerAll("before")
			lab.MustDo(t, node.Namespace, func() error { return bridgeUplink("eth0", "brex") })
			lab.Eventually(t, "the agent takes the uplink for a port with pods", func() bool {
				out, err := w.agents[0].Run("status")

				return err == nil && strings.Contains(out, "port of brex")
			})
			mustAnswerAll("as a port of a bridge")
			lab.MustDo(t, node.Namespace, func() error { return moveAddresses("brex", "eth0") })
			lab.Eventually(t, "the agent takes the uplink for one", func() bool {
				out, err := w.agents[0].Run("status")

				return err == nil && !strings.Contains(out, "port of brex")
			})
			mustAnswerAll("as an uplink again")
		})
	}
}

// bridgeUplink makes a bridge that has a device as its port, and takes its addresses and routes.
func bridgeUplink(device, bridge string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = bridge, link.Attrs().HardwareAddr
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return err
	}

	return moveAddresses(device, bridge)
}

// moveAddresses moves the addresses and routes of a device to another one. If that is a bridge, the device becomes its
// port, and if the device is a bridge, the other one ceases to be its port.
func moveAddresses(from, to string) error {
	source, err := netlink.LinkByName(from)
	if err != nil {
		return err
	}
	target, err := netlink.LinkByName(to)
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(source, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	routes, err := netlink.RouteList(source, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	if target.Type() == "bridge" {
		err = netlink.LinkSetMaster(source, target)
	} else {
		err = netlink.LinkSetNoMaster(target)
	}
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(target); err != nil {
		return err
	}
	for _, a := range addrs {
		if a.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := netlink.AddrDel(source, &a); err != nil {
			return err
		}
		if err := netlink.AddrAdd(target, &netlink.Addr{IPNet: a.IPNet, Flags: unix.IFA_F_NODAD}); err != nil {
			return err
		}
	}
	for _, r := range routes {
		if r.Protocol == unix.RTPROT_KERNEL || r.Gw == nil {
			continue
		}
		r.LinkIndex, r.Flags = target.Attrs().Index, 0
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("route %v: %w", r, err)
		}
	}

	return nil
}
