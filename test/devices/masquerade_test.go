package devices

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestManyMasqueraded holds ten thousand connections from one address to one
// backend open at once, and uses each again when all are there.
//
//	client ══ load balancer ══ node-1 ══ vxlan0 ══ pod-2-0 sees node-1, each time another port
func TestManyMasqueraded(t *testing.T) {
	t.Parallel()
	const many, rate = 10_000, 2_000
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450},
		filter: bridgeCNI,
		agent:  []string{"--flow-table-memory", "64Mi"}, // the default of an agent, if not of a test
	})
	w.mustBeStrict(t)
	c := casesOf(w)
	w.start(t, c.remote)
	caller, backend := w.outside(t), c.remote.backends[0]
	exchange := lab.Exchange{Network: "tcp", Address: c.remote.at(loadBalancer, ipv4, nil), Timeout: 6 * dialTimeout}
	reply, err := caller.Exchange(exchange)
	lab.Must(t, err, expect(reply, backend.name, sourcesTo(t, w.Nodes[0], backend)[ipv4]))

	before := w.servers[backend.name].Connections()
	load, err := caller.StartLoad(lab.Load{
		Exchange: exchange,
		Keep:     many,
		Rate:     rate,
		Duration: 2 * many * time.Second / rate, // two rounds
	})
	lab.Must(t, err)
	report, err := load.Wait()
	lab.Must(t, err)
	if report.Succeeded != 2*many {
		t.Errorf("%d of %d exchanges succeeded; failures: %v", report.Succeeded, report.Started, first(report.Failures))
	}
	// A connection that had failed would have been opened again.
	if made := w.servers[backend.name].Connections() - before; made != many {
		t.Errorf("%d connections came to the backend, want %d", made, many)
	}
}

// TestMasqueradePortsFollow changes which ports the kernel hands out to sockets of a node, while
// its agent runs: clients are masqueraded with others from then on, and those that are connected
// stay so.
func TestMasqueradePortsFollow(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Profile: "plain"}})
	c := casesOf(w)
	w.start(t, c.remote)
	caller, node := w.outside(t), w.Nodes[0]
	address := c.remote.at(loadBalancer, ipv4, nil)
	kept := mustConnect(t, caller, "tcp4", address)
	seen := func() (port uint16, err error) {
		reply, err := caller.Exchange(lab.Exchange{Network: "tcp4", Address: address, Timeout: dialTimeout})
		if err != nil {
			return 0, err
		}
		answer, err := lab.ParseAnswer(reply.Text)

		return answer.Client.Port(), err
	}
	port, err := seen()
	lab.Must(t, err)
	if port >= 30000 && port < 61000 {
		t.Errorf("port is %d, which is a node port or handed out to sockets", port)
	}
	lab.Must(t, node.Sysctl("net/ipv4/ip_local_port_range", "1024 60000"))
	lab.MustVeth(t, lab.End{Namespace: node.Namespace, Device: "new"}, lab.End{Namespace: w.Client.Namespace, Device: "new"}) // a check
	lab.Eventually(t, "ports are free that are not handed out", func() error {
		port, err := seen()
		if err == nil && port <= 60000 {
			err = fmt.Errorf("port is %d", port)
		}

		return err
	})
	lab.Must(t, answeredBy(kept, "pod-2-0"))
}

// TestManyMasqueradedWithEachSetting sets the ports of sockets and those that are reserved as tuning guides and
// distributions do, while the agent runs: each time 1,500 connections at a time to one backend work, and so does the
// one that was opened first.
//
//	client ══ node port ══ node-1 ══ vxlan0 ══ pod-2-0
func TestManyMasqueradedWithEachSetting(t *testing.T) {
	t.Parallel()
	const many = 1500
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, agent: []string{"--flow-table-memory", "64Mi"}})
	c := casesOf(w)
	w.start(t, c.remote)
	node, caller := w.Nodes[0], w.outside(t)
	address := c.remote.at(nodePort, ipv4, node)
	kept := mustConnect(t, caller, "tcp4", address)
	for i, test := range []struct{ name, ephemeral, reserved, ports string }{
		{"all ports are ephemeral, two are reserved", "1024 65535", "10249,10250", "32768-65535 and 10251-29999"},
		{"the kernel's defaults", "32768 60999", "", "1024-29999 and 61000-65535"},
		{"a range is left at the end", "1024 65000", "", "32768-65535 and 1024-29999"},
		{"a wide range, without node ports", "15000 65535", "30000-32767", "1024-14999"},
		{"all ports are ephemeral", "1024 65535", "", "32768-65535 and 1024-29999"},
		{
			"a wide range, and ports of the kubelet and others are reserved", "1024 65535",
			"1025-1030,4240-4245,9099,10248-10259,19999,30000-32767", "32768-65535 and 20000-29999",
		},
	} {
		lab.Must(t,
			node.Sysctl("net/ipv4/ip_local_port_range", test.ephemeral),
			node.Sysctl("net/ipv4/ip_local_reserved_ports", test.reserved+"\n"), // no byte at all would change nothing
		)
		device := fmt.Sprintf("new%d", i)
		lab.MustVeth(t, lab.End{Namespace: node.Namespace, Device: device}, lab.End{Namespace: w.Client.Namespace, Device: device}) // a check
		lab.Eventually(t, "the agent has the ports of the setting: "+test.name, func() error {
			s, err := w.agents[0].Status()
			if err == nil && !strings.HasPrefix(s.MasqueradePorts, test.ports+" (") {
				err = fmt.Errorf("they are %s, want %s", s.MasqueradePorts, test.ports)
			}

			return err
		})
		load, err := caller.StartLoad(lab.Load{
			Exchange: lab.Exchange{Network: "tcp4", Address: address, Timeout: 6 * dialTimeout},
			Keep:     many, Rate: many, Duration: time.Second,
		})
		lab.Must(t, err)
		report, err := load.Wait()
		lab.Must(t, err)
		if report.Succeeded != many {
			t.Errorf("%s, with the ports %s: %d of %d connections work; failures: %v", test.name, test.ports, report.Succeeded, report.Started, first(report.Failures))
		}
		lab.Must(t, answeredBy(kept, "pod-2-0"))
	}
}

// TestProcessWithThePortOfAMasquerade has a process of a node send from a port with which a client is masqueraded to the
// same backend, as the kernel hands out such ports where it has few others. The backend sees another port of it,
// and both get their own answers.
//
//	client ══ node port ══ node-1:P ══ pod-2-0
//	          process of node-1:P ════ pod-2-0
func TestProcessWithThePortOfAMasquerade(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		setting
	}{
		{"turned around", setting{Config: lab.Config{OverlayMTU: 1450}}},
		{"by way of the stack", setting{filter: looseCNI, agent: []string{"--heal=off"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, test.setting)
			c := casesOf(w)
			w.start(t, c.remote)
			node, backend := w.Nodes[0], c.remote.backends[0]
			client, process := w.outside(t), lab.MustCaller(t, node.Namespace, w.cgroups[0])
			for _, f := range families {
				for _, network := range networks {
					for name, address := range map[string]string{
						"the backend":    netip.AddrPortFrom(backend.ips[f], podPort).String(),
						"the cluster IP": c.remote.at(clusterIP, f, node),
					} {
						kept := mustConnect(t, client, network+[]string{"4", "6"}[f], c.remote.at(nodePort, f, node))
						masqueraded := mustAsk(t, kept).Client
						for range map[string]int{"tcp": 1, "udp": 2}[network] { // that of TCP is in TIME_WAIT then
							answer, err := answerTo(process, lab.Exchange{
								Network: network, Address: address, From: masqueraded.String(), Timeout: dialTimeout,
							})
							if err != nil || answer.Name != backend.name || answer.Client.Addr() != masqueraded.Addr() || answer.Client == masqueraded {
								t.Errorf("%s of %s from %s: %+v, %v", network, name, masqueraded, answer, err)
							}
							if after := mustAsk(t, kept); after.Name != backend.name || after.Client != masqueraded {
								t.Errorf("%s: the client gets %+v, and got %s as %s before", network, after, backend.name, masqueraded)
							}
						}
						lab.Must(t, kept.Close())
					}
				}
			}
		})
	}
}

// mustAsk asks on a connected socket.
func mustAsk(t *testing.T, socket *lab.Socket) lab.Answer {
	t.Helper()
	lab.Must(t, socket.Send("who\n"))
	text, _, err := socket.Recv()
	lab.Must(t, err)
	answer, err := lab.ParseAnswer(text)
	lab.Must(t, err)

	return answer
}

// TestMasqueradeByRoutes has clients whose answers would miss node-1 although the devices and the objects look as if they
// did not: a machine for which a pod forwards, to which node-2 has no route, and a client outside, of an endpoint whose
// nodeName is node-1 and whose address is on node-2.
//
//	behind 10.8.0.5 ── pod-1-0 ══ br0 ┐
//	                                  ├ node-1 ══ vxlan0 ══ pod-2-0
//	client ═════════════════════ eth0 ┘
func TestMasqueradeByRoutes(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}})
	node, gateway, behind := w.Nodes[0], w.Nodes[0].Pods[0], lab.MustNamespace(t, "behind")
	inside := [2]netip.Addr{netip.MustParseAddr("10.8.0.5"), netip.MustParseAddr("fd00:108::5")}
	near := [2]netip.Addr{netip.MustParseAddr("10.8.0.1"), netip.MustParseAddr("fd00:108::1")}
	bits := [2]int{24, 64}
	lab.MustVeth(t,
		lab.End{Namespace: gateway.Namespace, Device: "vpn", Addresses: []netip.Prefix{netip.PrefixFrom(near[ipv4], bits[ipv4]), netip.PrefixFrom(near[ipv6], bits[ipv6])}},
		lab.End{Namespace: behind, Device: "eth0", Addresses: []netip.Prefix{netip.PrefixFrom(inside[ipv4], bits[ipv4]), netip.PrefixFrom(inside[ipv6], bits[ipv6])}})
	for _, setting := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		lab.Must(t, gateway.Sysctl(setting, "1"))
	}
	for _, f := range families {
		lab.Must(t,
			behind.AddRoute([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}[f], near[f]),
			node.AddRoute(netip.PrefixFrom(inside[f], bits[f]).Masked(), podIPs(gateway)[f]))
	}
	c := casesOf(w)
	misplaced := c.remote
	misplaced.number, misplaced.backends = 21, []backend{c.remote.backends[0]}
	misplaced.backends[0].node = node.Name
	w.start(t, c.local, c.remote, misplaced)
	pods, outside := lab.MustCaller(t, behind, nil), w.outside(t)
	masquerade := sourcesTo(t, node, c.remote.backends[0])
	var associates [2][2]*lab.SCTPPeer // behind the pod, and outside, by family
	for _, f := range families {
		associates[0][f] = lab.MustSCTP(t, behind, inside[f], 4000)
		associates[1][f] = lab.MustSCTP(t, w.Client.Namespace, hostIPs(w.Client)[f], 4000)
		for _, pod := range []*lab.Pod{node.Pods[1], w.Nodes[1].Pods[0]} {
			go lab.MustSCTP(t, pod.Namespace, podIPs(pod)[f], podPort).Serve()
		}
	}

	for _, test := range []struct {
		name string
		from *lab.Caller
		sctp [2]*lab.SCTPPeer
		to   service
		way  way
		seen [2]netip.Addr
	}{
		{"behind a pod, to a pod of another node", pods, associates[0], c.remote, clusterIP, masquerade},
		{"behind a pod, to a pod of this node", pods, associates[0], c.local, clusterIP, inside},
		{"outside, to an endpoint that is said to be here", outside, associates[1], misplaced, loadBalancer, masquerade},
		{"outside, to a pod of this node", outside, associates[1], c.local, loadBalancer, hostIPs(w.Client)},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, f := range families {
				saw, err := test.sctp[f].Associate(netip.MustParseAddrPort(test.to.at(test.way, f, nil)), dialTimeout)
				if err != nil || saw != test.seen[f].String() {
					t.Errorf("%s, SCTP: the server saw %q, %v, want %s", f, saw, err, test.seen[f])
				}
				for _, network := range networks {
					reply, err := test.from.Exchange(lab.Exchange{Network: network, Address: test.to.at(test.way, f, nil), Timeout: dialTimeout})
					if err == nil {
						err = expect(reply, test.to.backends[0].name, test.seen[f])
					}
					if err != nil {
						t.Errorf("%s, %s: %v", f, network, err)
					}
				}
			}
		})
	}
}

// TestOnePortToTwoServices has a client use one port of its own for several
// Services, and for several addresses of one, which have one backend. To that they
// would all be the same connection.
//
//	client:2222 ─┬─ load balancer of one ───────┐
//	             ├─ external IP of one ─────────┼─ pod-1-1, pod-2-0 or node-1
//	             └─ load balancer of another ───┘
func TestOnePortToTwoServices(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: lab.Routed}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	another := func(s service, number int) service {
		s.number = number
		return s
	}
	pairs := [][2]service{
		{c.local, another(c.local, 21)}, {c.remote, another(c.remote, 22)}, {c.host, another(c.host, 23)},
	}
	var all []service
	for _, pair := range pairs {
		all = append(all, pair[:]...)
	}
	w.start(t, all...)
	client, pod := w.outside(t), w.optedOut(t, w.Nodes[0].Pods[0])

	for _, f := range families {
		for _, network := range networks {
			for i, pair := range pairs {
				addresses := []string{pair[0].at(loadBalancer, f, nil), pair[0].at(externalIP, f, nil), pair[1].at(loadBalancer, f, nil)}
				from := fmt.Sprintf("%s, %s to %s", f, network, pair[0].backends[0].name)
				t.Run("client, "+from, func(t *testing.T) {
					mustShare(t, client, network, netip.AddrPortFrom(hostIPs(w.Client)[f], uint16(2222+i)), addresses...)
				})
				t.Run("pod, "+from, func(t *testing.T) {
					mustShare(t, pod, network, netip.AddrPortFrom(podIPs(w.Nodes[0].Pods[0])[f], uint16(2222+i)), addresses...)
				})
			}
		}
	}
}

// TestServiceBesideADirectConnection has a client dial a backend itself and then, from the same
// port, two addresses of its Service. netfilter knows the first connection.
//
//	client:3333 ─┬───────────────────┐
//	             ├─ load balancer ───┼─ pod-1-1, node-1
//	             └─ external IP ─────┘
func TestServiceBesideADirectConnection(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450, Attachment: lab.Routed}, filter: bridgeCNI})
	node := w.Nodes[0]
	lab.Must(t, w.Client.AddRoute(netip.PrefixFrom(node.Pods[1].IPv4, 32), node.IPv4))
	lab.Must(t, w.Client.AddRoute(netip.PrefixFrom(node.Pods[1].IPv6, 128), node.IPv6))
	c := casesOf(w)
	w.start(t, c.local, c.host)
	client, pod := w.outside(t), w.optedOut(t, node.Pods[0])

	for _, f := range families {
		for _, network := range networks {
			for i, s := range []service{c.local, c.host} {
				direct := netip.AddrPortFrom(s.backends[0].ips[f], podPort).String()
				addresses := []string{direct, s.at(loadBalancer, f, nil), s.at(externalIP, f, nil)}
				if network == "tcp" && s.number == c.host.number {
					t.Run(fmt.Sprintf("%s, the node after its Service", f), func(t *testing.T) {
						mustShare(t, client, network, netip.AddrPortFrom(hostIPs(w.Client)[f], 3336), addresses[1], direct)
					})
				}
				from := fmt.Sprintf("%s, %s to %s", f, network, s.backends[0].name)
				t.Run("client, "+from, func(t *testing.T) {
					mustShare(t, client, network, netip.AddrPortFrom(hostIPs(w.Client)[f], uint16(3333+i)), addresses...)
				})
				t.Run("pod, "+from, func(t *testing.T) {
					mustShare(t, pod, network, netip.AddrPortFrom(podIPs(node.Pods[0])[f], uint16(3333+i)), addresses...)
				})
			}
		}
	}
}

// mustShare dials from one port to several addresses, keeps all connections, and
// asks each of them twice.
func mustShare(t *testing.T, from *lab.Caller, network string, port netip.AddrPort, addresses ...string) {
	t.Helper()
	network += map[bool]string{false: "4", true: "6"}[port.Addr().Is6()]
	var sockets []*lab.Socket
	for _, address := range addresses {
		socket, err := from.Socket(network)
		lab.Must(t, err)
		defer socket.Close()
		lab.Must(t,
			socket.SetTimeout(dialTimeout),
			socket.SetOption(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			socket.SetOption(unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
			socket.Bind(port.String()),
			socket.Connect(address),
		)
		sockets = append(sockets, socket)
	}
	seen := make(map[netip.AddrPort]int)
	for round := range 2 {
		for i, socket := range sockets {
			lab.Must(t, socket.Send("who\n"))
			text, _, err := socket.Recv()
			if err != nil {
				t.Fatalf("%s, question %d: %v", addresses[i], round+1, err)
			}
			answer, err := lab.ParseAnswer(text)
			lab.Must(t, err)
			if other, ok := seen[answer.Client]; ok && other != i {
				t.Errorf("%s and %s are both %s to %s", addresses[other], addresses[i], answer.Client, answer.Name)
			}
			seen[answer.Client] = i
		}
	}
	if len(seen) != len(addresses) {
		t.Errorf("backend saw %v, want one client port per address", seen)
	}
}
