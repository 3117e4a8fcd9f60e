package devices

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// opened is a connection, or an exchange of datagrams, that stays open.
type opened struct {
	*talk
	what string
	// needsAddress is set if it lasts only as long as the node has its first address: it is to that, masqueraded by it, or
	// goes through a tunnel from there.
	needsAddress bool
}

// change is what an administrator does to the network of node-1.
type change struct {
	name     string
	commands string // in the node's namespace, a line each
	renames  string // the name of a device that status has afterwards, "" if none is renamed
	renumber bool   // the first address of the node goes
}

// TestNetworkChanges has an administrator change the network of a node: names, link-layer addresses and IP addresses of its
// devices. What was open goes on, over TCP and UDP, from outside and from a pod past its sockets, to backends
// here and on another node, turned around and by way of the stack. New connections work, too.
//
//	client ── eth0 of node-1 ─┬─ br0 ─┬─ pod-1-0
//	                          │       └─ pod-1-1, a client that no socket hook sees
//	                          └─ node-2 ─ pod-2-0
func TestNetworkChanges(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]setting{
		"turned around": {},
		"by way of the stack": {
			Config: lab.Config{OverlayMTU: 1450}, filter: looseCNI, agent: []string{"--forwarding=stack", "--device-attach=clsact"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, s)
			w.playNetworkChanges(t)
		})
	}
}

// second are addresses that the node has beside its own.
var second = [2]netip.Addr{netip.MustParseAddr("192.168.77.1"), netip.MustParseAddr("fd00:50:0:77::1")}

// addSecond returns the command that gives the node one of them. It is no source of what the node sends.
func addSecond(ip netip.Addr) string {
	return fmt.Sprintf("ip address replace %s/%d dev eth0 nodad preferred_lft 0", ip, ip.BitLen())
}

func (w *world) playNetworkChanges(t *testing.T) {
	t.Helper()
	node, other := w.Nodes[0], w.Nodes[1]
	here := service{number: 46, backends: []backend{onPod(node.Pods[0])}}
	there := service{number: 47, backends: []backend{onPod(other.Pods[0])}}
	for f, ip := range second {
		lab.Must(t, configure(node.Namespace, addSecond(ip)))
		mustConfigure(t, w.Client.Namespace, fmt.Sprintf("ip -%d route add %s dev eth0", 4+2*f, ip))
	}
	w.start(t, here, there)
	var all []opened
	open := func(ns *lab.Namespace, network, to, what string, needsAddress bool) {
		what = fmt.Sprintf("%s to %s, opened %s", network, to, what)
		lab.EventuallyIn(t, dialTimeout, what, func() error { // the agent has to see what has changed
			conn, err := ns.Dial(network, to, dialTimeout)
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = conn.Close() })
			all = append(all, opened{newTalk(conn), what, needsAddress})
			if err = all[len(all)-1].ask("who"); err != nil {
				all = all[:len(all)-1]
			}

			return err
		})
	}
	openAll := func(when string) {
		for _, s := range []service{here, there} {
			for _, f := range families {
				for _, network := range []string{"tcp", "udp"} {
					what := when + ", to " + s.backends[0].name
					open(w.Client.Namespace, network, s.at(nodePort, f, node), what, true)
					open(w.Client.Namespace, network, netip.AddrPortFrom(second[f], s.nodePort()).String(), what, s.number == there.number)
					open(node.Pods[1].Namespace, network, s.at(clusterIP, f, node), what, s.number == there.number && w.setting.OverlayMTU != 0)
				}
			}
		}
	}
	mustGoOn := func(when string, withoutAddress bool) {
		t.Helper()
		for _, o := range all {
			if withoutAddress && o.needsAddress {
				continue
			}
			if err := o.ask("who"); err != nil {
				t.Errorf("%s: %s: %v", when, o.what, err)
			}
		}
	}
	openAll("at first")
	routes := routesOf(t, node)
	lab.Must(t, node.Sysctl("net/ipv4/conf/eth0/promote_secondaries", "1")) // those stay that a network has beside the first one
	live := configure(w.Client.Namespace, "ip link add name lab0 type veth peer name lab1\nip link set lab0 up\nip link set lab0 name lab2\nip link del lab2") == nil
	if !live {
		t.Log("this kernel gives no device another name that is up (Linux 6.2)")
	}
	gateway := fmt.Sprintf("ip address replace %s/64 dev ", node.PodCIDRs[ipv6].Addr().Next())
	for _, c := range []change{
		{"the uplink gets another name", rename(live, "eth0", "up0", strings.ReplaceAll(routes, "dev eth0", "dev up0")), "up0", false},
		{"the uplink gets another name while it is down", rename(false, "up0", "eth0", routes), "eth0", false},
		{"devices of pods get other names", rename(live, "pod0", "cali0", "") + "\n" + rename(live, "pod1", "cali1", ""), "cali1", false},
		{"a device of a pod gets another name while it is down", rename(false, "cali0", "pod0", ""), "pod0", false},
		{"the bridge of pods gets another name", rename(live, "br0", "cni0", gateway+"cni0 nodad"), "cni0", false},
		{"the bridge of pods gets its first name", rename(live, "cni0", "br0", gateway+"br0 nodad"), "br0", false},
		{"a device of a pod gets its first name", rename(live, "cali1", "pod1", ""), "pod1", false},
		{"the uplink gets another link-layer address", "ip link set eth0 address 02:50:00:00:00:77", "", false},
		{"the uplink loses its addresses for a moment", "ip address flush dev eth0 scope global\nsleep 1\n" + routes, "", false},
		{"an address comes", "ip address add 192.168.50.201/24 dev eth0\nip address add fd00:50::201/64 dev eth0 nodad", "", false},
		{"the node gets another address", "ip address del 192.168.50.1/24 dev eth0\nip address del fd00:50::1/64 dev eth0", "", true},
	} {
		mustConfigure(t, node.Namespace, c.commands)
		if c.renumber && w.setting.OverlayMTU == 0 {
			mustConfigure(t, other.Namespace, fmt.Sprintf("ip route replace %s via 192.168.50.201\nip -6 route replace %s via fd00:50::201",
				node.PodCIDRs[ipv4].Masked(), node.PodCIDRs[ipv6].Masked()))
		}
		for _, ns := range []*lab.Namespace{w.Client.Namespace, other.Namespace} {
			mustConfigure(t, ns, "ip neigh flush dev eth0")
		}
		mustGoOn(c.name, c.renumber)
		if t.Failed() || c.renumber {
			return
		}
		if c.renames != "" {
			lab.Eventually(t, "the agent knows "+c.renames, func() bool {
				out, err := w.agents[0].Run("status")

				return err == nil && strings.Contains(out, "\n"+c.renames+" ")
			})
			mustGoOn(c.name+", and the agent knows", false)
		}
		openAll("after " + c.name)
	}
}

// routesOf returns the commands that give the uplink of a node its addresses and routes back. A device that is down loses its
// addresses of IPv6, and its routes.
func routesOf(t *testing.T, node *lab.Node) string {
	t.Helper()
	commands := fmt.Sprintf("ip address replace %s/24 dev eth0\nip address replace %s/64 dev eth0 nodad\n%s\n%s\n",
		node.IPv4, node.IPv6, addSecond(second[ipv4]), addSecond(second[ipv6]))
	for _, version := range []string{"-4", "-6"} {
		out, err := lab.Output(node.Namespace, nil, "ip", version, "route", "show", "dev", "eth0")
		lab.Must(t, err)
		for line := range strings.Lines(out) {
			if strings.Contains(line, " via ") {
				commands += fmt.Sprintf("ip %s route replace %s dev eth0\n", version, strings.TrimSpace(strings.ReplaceAll(line, "linkdown", "")))
			}
		}
	}

	return commands
}

func mustConfigure(t *testing.T, ns *lab.Namespace, commands string) {
	t.Helper()
	lab.Must(t, configure(ns, commands))
}

// configure runs commands in a namespace.
func configure(ns *lab.Namespace, commands string) error {
	for line := range strings.Lines(commands) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if out, err := lab.Output(ns, nil, words[0], words[1:]...); err != nil {
			return errors.Join(fmt.Errorf("%s: %s", line, out), err)
		}
	}

	return nil
}

// rename returns the commands that give a device another name. Before Linux 6.2 it has to be down meanwhile; afterwards
// commands give it back what it loses by that.
func rename(live bool, from, to, afterwards string) string {
	if live {
		return fmt.Sprintf("ip link set %s name %s", from, to)
	}

	return fmt.Sprintf("ip link set %s down\nip link set %s name %s\nip link set %s up\n%s", from, from, to, to, afterwards)
}
