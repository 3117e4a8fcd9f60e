package bpf

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// turned publishes the ClusterIP with a backend on another node, and returns what may be said by it.
func turned(t *testing.T, w *world, p place, proto layers.IPProtocol) *conversation {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})

	return &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: remotePod}
}

// What goes to a backend on another node and back leaves by the device by which it comes, whatever
// it looks like, and needs no hook but that.
func TestTurnedFlows(t *testing.T) {
	for _, test := range []struct {
		name  string
		only  layers.IPProtocol
		shape func(packet) packet
	}{
		{name: "plain", shape: unchanged},
		{name: "of a traffic class", shape: func(p packet) packet { return p.withTOS(0xb9) }},
		{name: "with two hops left", shape: func(p packet) packet { return p.withHops(2) }},
		{name: "empty, in a frame that is filled up", shape: func(p packet) packet { return p.with("").padded(46) }},
		{name: "of one byte", shape: func(p packet) packet { return p.with("x") }},
		{name: "long", shape: func(p packet) packet { return p.long(1401) }},
		{name: "without a checksum", only: layers.IPProtocolUDP, shape: packet.withoutSum},
	} {
		for _, proto := range transports {
			if test.only != 0 && test.only != proto {
				continue
			}
			t.Run(fmt.Sprintf("%s %s", proto, test.name), func(t *testing.T) {
				each(t, []place{turning}, func(t *testing.T, w *world, p place) {
					c := turned(t, w, p, proto)
					in := first(proto, client, clusterIP)
					c.goesOn(w.ingress(t, p, in), maps.ReasonTranslated)
					c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
					if proto != layers.IPProtocolSCTP { // whose tags are in what is shaped
						c.goesOn(w.ingress(t, p, test.shape(in)), maps.ReasonFlow)
					}
					w.holds(t, 2, true)
					c.establish(t)
					for range 2 {
						c.returns(t, test.shape(answer(proto, remotePod, node)))
						c.says(t, test.shape(second(proto, client, clusterIP)))
						w.holds(t, 2, false)
					}
					w.egress(t, p, in.from(node).fromPort(c.masqueradedPort).to(remotePod)).passes(maps.ReasonPassOtherTraffic)
				})
			})
		}
	}
}

// A TCP connection to a node port of this node.
func TestTurnedNodePort(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{remotePod}})
		c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: "8.0.50.1:30080", backend: remotePod}
		c.first(t, maps.ReasonTranslated)
		c.masqueradedPort = maps.Port(w.flowOf(t, client, c.vip).MasqueradePort)
		c.establish(t)
		w.holds(t, 2, false)
	})
}

// What a packet, a device or a route has that only the stack knows how to deal with.
var forStack = []struct {
	name   string
	tcp    bool // no other protocol has it
	reply  bool // and for answers as well
	long   bool // the stack fragments it; no router fragments IPv6
	shape  func(packet) packet
	before func(*testing.T, *world)
}{
	{name: "the last hop", reply: true, shape: func(p packet) packet { return p.withHops(1) }},
	{name: "options", reply: true, shape: func(p packet) packet { return p.withExtras(1) }},
	{name: "a tag in the frame", reply: true, shape: func(p packet) packet { return p.tagged(7) }},
	{name: "a part of a datagram", tcp: true, reply: true, shape: func(p packet) packet { return p.long(1000).fragment(0, 512) }},
	{name: "too many bytes", reply: true, long: true, shape: func(p packet) packet { return p.long(1490) }},
	{name: "too long segments", reply: true, long: true, tcp: true, shape: func(p packet) packet { return p.long(3000) },
		before: func(t *testing.T, w *world) { w.gsoSize = 1461 }},
	{name: "all stations of the Ethernet for its destination", shape: packet.broadcast},
	{name: "a way by another device", before: func(t *testing.T, w *world) { w.turn(t, "eth1") }},
	{name: "a next hop that does not answer yet", reply: true, before: func(t *testing.T, w *world) {
		t.Cleanup(func() { lab.Must(t, w.setNeighbours("eth0", true)) })
		lab.Must(t, w.setNeighbours("eth0", false))
	}},
	{name: "no way that leads past it", reply: true, before: func(t *testing.T, w *world) { w.turn(t) }},
}

// Each of these goes through the stack from its first packet on.
func TestPacketsForTheStack(t *testing.T) {
	for _, test := range forStack {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := turned(t, w, p, layers.IPProtocolTCP)
				in := tcp(client, clusterIP, "S")
				if test.shape != nil {
					in = test.shape(in)
				}
				if test.before != nil {
					test.before(t, w)
				}
				w.ingress(t, p, in).becomes(in.to(remotePod), maps.ReasonTranslated)
				w.holds(t, 4, true)
				c.throughStack(t)
				w.holds(t, 4, false)
			})
		})
	}
}

// throughStack has the conversation go on through the stack, from its second packet on.
func (c *conversation) throughStack(t *testing.T) {
	t.Helper()
	c.w.gsoSize, c.w.turns = 0, false
	defer func() { c.w.turns = true }()
	c.masqueradedPort = maps.Port(c.w.flowOf(t, client, clusterIP).MasqueradePort)
	c.establish(t)
	c.returns(t, answer(c.proto, remotePod, node))
}

// And so does a flow that was turned before, from then on, in each state and of each protocol.
func TestTurnedFlowsGoThroughTheStack(t *testing.T) {
	for _, test := range forStack {
		for _, reply := range []bool{false, true} {
			for _, open := range []bool{false, true} {
				if reply && !test.reply {
					continue
				}
				t.Run(fmt.Sprintf("%s, in a reply: %v, open: %v", test.name, reply, open), func(t *testing.T) {
					for _, proto := range transports {
						if test.tcp && proto != layers.IPProtocolTCP {
							continue
						}
						each(t, []place{turning}, func(t *testing.T, w *world, p place) {
							if test.long && w.family == ipv6 {
								return
							}
							c := turned(t, w, p, proto)
							c.first(t, maps.ReasonTranslated)
							c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
							if open {
								c.establish(t)
							}
							w.holds(t, 2, !open)
							in, want := second(proto, client, clusterIP), client
							if !open {
								in = first(proto, client, clusterIP)
							}
							if reply {
								in, want = answer(proto, remotePod, node).toPort(c.masqueradedPort), client
							}
							if test.shape != nil {
								in = test.shape(in)
							}
							if test.before != nil {
								test.before(t, w)
							}
							o := w.ingress(t, p, in)
							if reply {
								o.becomes(in.to(want), maps.ReasonFlow)
							} else {
								o.becomes(in.to(remotePod), maps.ReasonFlow)
							}
							w.holds(t, 4, !open && (!reply || proto != layers.IPProtocolUDP))
							w.mustPassFilters(t)
							c.throughStack(t)
							w.holds(t, 4, false)
						})
					}
				})
			}
		}
	}
}

// A packet that only the stack could handle, and that is not of the connection, does not make it pass the stack.
func TestStrangersPacketForTheStack(t *testing.T) {
	for _, test := range forStack {
		if test.shape == nil || test.long {
			continue
		}
		t.Run(test.name, func(t *testing.T) {
			for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolSCTP} {
				if test.tcp && proto != layers.IPProtocolTCP {
					continue
				}
				each(t, []place{turning}, func(t *testing.T, w *world, p place) {
					c := begin(t, w, p, proto, remotePod)
					c.establish(t)
					strange := second(proto, client, clusterIP).numbered(1 << 30).acks(1 << 30).bearing("stranger")
					w.ingress(t, p, test.shape(strange)).drops(maps.ReasonDropNoFlow)
					if test.reply {
						w.ingress(t, p, test.shape(strange.from(remotePod).to(node).toPort(c.masqueradedPort))).drops(maps.ReasonDropNoFlow)
					}
					w.ingress(t, podVeth, strange.from(remotePod).to(node).toPort(c.masqueradedPort)).drops(maps.ReasonDropNoFlow)
					w.holds(t, 2, false)
					c.says(t, second(proto, client, clusterIP))
					c.returns(t, third(proto, remotePod, node))
				})
			}
		})
	}
}

// A datagram has no numbers to show, so a stranger's makes the flow pass the stack: once, with two entries more, which
// take no room in flows that UDP has not.
func TestStrangersDatagramForTheStack(t *testing.T) {
	for _, roomless := range []bool{false, true} {
		t.Run(fmt.Sprintf("without room: %v", roomless), func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, layers.IPProtocolUDP, remotePod)
				c.establish(t)
				if roomless {
					w.use(t, w.room(t), w.room(t))
					defer w.use(t, 0, 0)
				}
				strange := udp(client, clusterIP).bearing("stranger").withExtras(1)
				for range 3 {
					w.ingress(t, p, strange).becomes(strange.to(remotePod), maps.ReasonFlow)
				}
				var open, half int
				for _, e := range w.entries(t) {
					if e.halfOpen {
						half++
					} else {
						open++
					}
				}
				if open+half != 4 || (half != 0) != roomless {
					t.Errorf("%d entries are in flows, and %d are not, want four in all", open, half)
				}
				c.throughStack(t)
			})
		})
	}
}

// Flows fill their part of the table, turned around. When a firewall appears, all of them pass the stack: the table gets no
// more entries than it has room for, so the kernel evicts no idle connection.
func TestManyFlowsGoThroughTheStack(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		var all []*conversation
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		limit := w.room(t) - w.room(t)/4
		w.use(t, limit-800, 0)
		for i := 0; ; i++ {
			c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod}
			c.place.client = clientAt(i)
			if o := w.ingress(t, p, tcp(c.place.client, clusterIP, "S")); o.reasons[maps.ReasonDropFlowTable] == 1 {
				break
			}
			c.masqueradedPort = maps.Port(w.flowOf(t, c.place.client, clusterIP).MasqueradePort)
			c.establish(t)
			all = append(all, c)
		}
		idle, busy := all[:100], all[100:]
		w.turn(t)
		w.turns = false
		for _, c := range busy {
			c.says(t, segment("P.").with("go on"))
		}
		if used := w.maps.FlowUsage.Load(maps.FlowsConnected); used > int64(limit) {
			t.Errorf("%d entries are in flows, with room for %d", used, limit)
		}
		for _, c := range idle {
			c.says(t, segment("P.").with("go on"))
			c.returns(t, segment("P.").acks(6).with("go on"))
			c.hears(t, segment("P.").acks(6).with("go on"))
		}
	})
}

// A packet that is too long for the route and must not be fragmented gets an error with the MTU, and the
// connection goes on.
func TestTooLongToBeTurned(t *testing.T) {
	if !atLeast(t, 5, 12) {
		t.Skip("this kernel's lookup of routes knows no MTU (Linux 5.12)")
	}
	for name, size := range map[string]uint32{"a packet": 0, "segments": 1461} {
		t.Run(name, func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := turned(t, w, p, layers.IPProtocolTCP)
				c.first(t, maps.ReasonTranslated)
				c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
				c.establish(t)
				what := tooBig
				what.rest = 1500
				for _, in := range []packet{
					tcp(client, clusterIP, "P.").long(1490).uncut(), tcp(remotePod, node, "P.").toPort(c.masqueradedPort).long(1490).uncut(),
				} {
					for range 10 { // nor is that limited
						w.gsoSize = size
						o := w.refused(t, p, in)
						w.gsoSize = 0
						want := icmpError(what, node, in.src.String(), in).quoting(quotedAtMost).withTOS(0xc0)
						want.own = true
						o.rejects(want, maps.ReasonFlowError)
					}
				}
				w.holds(t, 2, false)
				c.says(t, tcp(client, clusterIP, "P.").with("shorter").uncut())
				c.returns(t, tcp(remotePod, node, "P.").with("shorter").uncut())
			})
		})
	}
}

// There is no error about an error.
func TestTooLongErrorsAboutTurnedFlows(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		c := turned(t, w, p, layers.IPProtocolTCP)
		c.first(t, maps.ReasonTranslated)
		sent := tcp(clusterIP, client, "P.").long(1490)
		w.ingress(t, p, icmpError(timeExceeded, router, clusterIP, sent).uncut()).
			becomes(icmpError(timeExceeded, router, remotePod, sent.from(remotePod)).uncut(), maps.ReasonFlowError)
		w.holds(t, 4, true)
	})
}

// Segments of the right length are turned, however many come in one.
func TestTurnedSegments(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		c := turned(t, w, p, layers.IPProtocolTCP)
		c.first(t, maps.ReasonTranslated)
		c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
		c.establish(t)
		w.gsoSize = 1440
		c.says(t, tcp(client, clusterIP, "P.").long(3000))
		c.returns(t, tcp(remotePod, node, "P.").long(3000))
		w.holds(t, 2, false)
	})
}

// Whose answers would leave by another device than that by which the client has come is not turned.
func TestClientByAnotherDevice(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		in := tcp("8.0.3.9:40000", clusterIP, "S") // the way there is by eth1
		w.ingress(t, p, in).becomes(in.to(remotePod), maps.ReasonTranslated)
		w.holds(t, 4, true)
	})
}

// A backend that another device leads to is reached by that, and its answers come by it.
func TestTurnedToAnotherDevice(t *testing.T) {
	each(t, []place{turning}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{farPod}})
		in := tcp(client, clusterIP, "S")
		o := w.ingress(t, p, in)
		f := w.flowOf(t, client, clusterIP)
		source := nodeOther
		if w.family.addrPort(at(nodePrefers)).Addr() == f.MasqueradeAddrPort().Addr() {
			source = nodePrefers // the kernel reports sources (Linux 6.7)
		}
		port := maps.Port(f.MasqueradePort)
		o.leaves(in.from(source).fromPort(port).to(farPod), maps.ReasonTranslated)
		other := p
		other.device = "eth1"
		reply := tcp(farPod, source, "S.").toPort(port)
		w.ingress(t, other, reply).leaves(reply.from(clusterIP).to(client), maps.ReasonFlow)
	})
}

// Only at uplinks with Ethernet, and only to backends beyond this node.
func TestWhatIsNotTurned(t *testing.T) {
	for _, test := range []struct {
		name    string
		at      []place
		backend string
		flags   uint16
	}{
		{"to a pod of this node", []place{turning}, tapPod, 0},
		{"to a pod of this node, masqueraded", []place{turning}, tapPod, maps.PoolMasquerade},
		{"to this node", []place{turning}, hostPod, 0},
		{"from pods, tunnels and ports of bridges", []place{podVeth, podTun, podPort, tunnel, bridgedNIC}, remotePod, maps.PoolMasquerade},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, test.at, func(t *testing.T, w *world, p place) {
				w.turn(t, "eth0", "eth1", "wg0", "br0", "nic0", "port0", "tap0", "tun0")
				w.serve(t, service{at: []string{clusterIP}, to: []string{test.backend}, flags: test.flags})
				in := tcp(p.client, clusterIP, "S")
				w.ingress(t, p, in).becomes(in.to(test.backend), maps.ReasonTranslated)
			})
		})
	}
}

// A reply that comes by a device where nothing is turned takes the flow to the stack.
func TestReplyByAnotherKindOfDevice(t *testing.T) {
	for _, by := range []place{tunnel, bridgedNIC, podVeth} {
		t.Run("by "+by.String(), func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := turned(t, w, p, layers.IPProtocolTCP)
				c.first(t, maps.ReasonTranslated)
				c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
				reply := answer(c.proto, remotePod, node).toPort(c.masqueradedPort)
				// A bridge often has the Ethernet address of one of its ports.
				between := ends{src: macOf(reply.src.Addr()), dst: w.links[by.device].Attrs().HardwareAddr}
				w.run(t, w.programs(t, by).Ingress, by, reply, between).becomes(reply.to(client), maps.ReasonFlow)
				c.throughStack(t)
			})
		})
	}
}

// Two flows of one client's port to one backend differ in their masquerade, and when they go through
// the stack by the port that it sees.
func TestTurnedFlowsOfOnePort(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				var all []*conversation
				for _, vip := range []string{clusterIP, otherIP} {
					w.serve(t, service{at: []string{vip}, proto: proto, to: []string{remotePod}})
					c := &conversation{w: w, place: p, proto: proto, vip: vip, backend: remotePod}
					c.first(t, maps.ReasonTranslated)
					c.masqueradedPort = maps.Port(w.flowOf(t, client, vip).MasqueradePort)
					c.establish(t)
					all = append(all, c)
				}
				w.holds(t, 4, false)
				w.turn(t)
				for _, c := range all {
					in := second(proto, client, c.vip)
					o := w.ingress(t, p, in)
					port := maps.Port(w.flowOf(t, client, c.vip).StackPort)
					if (port == 40000) != (c == all[0]) {
						t.Errorf("the stack sees port %d", port)
					}
					o.becomes(in.fromPort(port).to(remotePod), maps.ReasonFlow)
					w.egress(t, p, in.fromPort(port).to(remotePod)).
						becomes(in.from(node).fromPort(c.masqueradedPort).to(remotePod), maps.ReasonFlow)
					reply := answer(proto, remotePod, node).toPort(c.masqueradedPort)
					w.ingress(t, p, reply).becomes(reply.to(client).toPort(port), maps.ReasonFlow)
					reply = answer(proto, remotePod, client).toPort(port)
					w.egress(t, p, reply).becomes(reply.from(c.vip).to(client), maps.ReasonFlow)
				}
				w.holds(t, 8, false)
			})
		})
	}
}

// A connection that ends while it is led to the stack is known to have ended, and its port is free.
func TestEndingAcrossTheTurn(t *testing.T) {
	for _, test := range []struct {
		name  string
		said  []said
		stays int // so many are said before
	}{
		{"closed by the client", closedByClient, 1}, {"closed by the client, late", closedByClient, 2},
		{"closed by the backend", closedByBackend, 1}, {"closed by the backend, late", closedByBackend, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := beginOnOnePort(t, w, p)
				c.establish(t)
				for i, said := range test.said {
					if i == test.stays {
						w.turn(t)
						w.turns = false
					}
					said.on(t, c)
				}
				if live := c.live(t); live != 0 {
					t.Errorf("the backend has %d connections", live)
				}
				c.mustHold(t, free, segment("S").numbered(9))
			}, onePort)
		})
	}
}

// Errors about turned flows are turned, in both directions; and through the stack, if they have to be.
func TestErrorsAboutTurnedFlows(t *testing.T) {
	eachError(t, []place{turning}, remotePod, func(t *testing.T, e errorWorld, what icmpKind) {
		if e.shape(packet{}).extras > 0 {
			return // the flow that they are about is not turned
		}
		w, p, port := e.w, e.place, e.masqueradedPort

		sent := answer(e.proto, clusterIP, client)
		seen := sent.from(remotePod).to(node).toPort(port)
		for src, speaker := range map[string]string{router: router, client: node} {
			w.ingress(t, p, e.about(what, src, clusterIP, sent)).
				leaves(e.about(what, speaker, remotePod, seen), maps.ReasonFlowError)
		}
		left := second(e.proto, node, remotePod).fromPort(port)
		for src, speaker := range map[string]string{remotePod: clusterIP, farRouter: farRouter} {
			w.ingress(t, p, e.about(what, src, node, left)).
				leaves(e.about(what, speaker, client, second(e.proto, client, clusterIP)), maps.ReasonFlowError)
		}
		// By a device of pods, or in a form that only the stack forwards, they are translated all the same.
		w.ingress(t, podVeth, e.about(what, farRouter, node, left)).
			becomes(e.about(what, farRouter, client, second(e.proto, client, clusterIP)), maps.ReasonFlowError)
		lastHop := e.about(what, router, clusterIP, sent).withHops(1)
		w.ingress(t, p, lastHop).becomes(e.about(what, router, remotePod, seen).withHops(1), maps.ReasonFlowError)
		w.holds(t, 2, false)

		w.turn(t)
		defer w.turn(t, "eth0", "eth1")
		w.ingress(t, p, e.about(what, router, clusterIP, sent)).
			becomes(e.about(what, router, remotePod, sent.from(remotePod)), maps.ReasonFlowError)
		w.holds(t, 4, false)
		w.egress(t, p, e.about(what, router, remotePod, sent.from(remotePod))).
			becomes(e.about(what, router, remotePod, seen), maps.ReasonFlowError)
		e.again(t)
	})
}

// again has the flow of the conversation begin once more, turned.
func (e errorWorld) again(t *testing.T) {
	t.Helper()
	for _, entry := range e.w.entries(t) {
		e.w.delete(t, entry)
	}
	e.w.turn(t, "eth0", "eth1")
	port := e.conversation.masqueradedPort
	e.first(t, maps.ReasonTranslated)
	if e.conversation.masqueradedPort = maps.Port(e.w.flowOf(t, client, clusterIP).MasqueradePort); e.proto == layers.IPProtocolUDP && e.masqueradedPort != port {
		t.Errorf("port %d was %d", e.masqueradedPort, port)
	}
	e.establish(t)
}

// On a real device, packets leave for the router that leads there, with checksums that their device has yet to
// compute, and in segments that it has yet to cut.
func TestTurnedOffloads(t *testing.T) {
	for _, test := range []struct {
		name string
		in   packet
		size uint16
	}{
		{"TCP with its checksum to come", tcp(client, clusterIP, "P.").with("hello"), 0},
		{"UDP with its checksum to come", udp(client, clusterIP), 0},
		{"TCP to be cut", tcp(client, clusterIP, "P.").long(4001), 1000},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{turning}, func(t *testing.T, w *world, p place) {
				c := turned(t, w, p, test.in.proto)
				c.first(t, maps.ReasonTranslated)
				c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
				outside := mustStation(t, w.outside, "eth0")
				w.attach(t, "eth0", netlink.HANDLE_MIN_INGRESS, w.programs(t, p).Ingress)
				w.attach(t, "eth0", netlink.HANDLE_MIN_EGRESS, w.programs(t, p).Egress)
				kind := map[bool]map[family]uint8{true: {ipv4: gsoTCPv4, ipv6: gsoTCPv6}}[test.size > 0][w.family]
				out := test.in.from(node).fromPort(c.masqueradedPort).to(remotePod)
				back := test.in.from(remotePod).to(node).toPort(c.masqueradedPort)
				for _, step := range []struct {
					in, want packet
					router   string
				}{{test.in, out, farRouter}, {back, back.from(clusterIP).to(client), defaultRouter}} {
					own := w.links["eth0"].Attrs().HardwareAddr
					outside.send(t, step.in.frame(w.family, ends{src: macOf(step.in.src.Addr()), dst: own}), kind, test.size)
					got, header := outside.receive(t, step.want, w.family)
					if header.GSOSize != test.size || header.GSOType != kind {
						t.Errorf("it came with type %d and %d bytes a segment, want %d and %d", header.GSOType, header.GSOSize, kind, test.size)
					}
					o := outcome{t: t, w: w, place: p, got: got}
					step.want.hops--
					o.compare(step.want.frame(w.family, ends{src: own, dst: macOf(at(step.router).Addr())}))
				}
			})
		})
	}
}

// A route of IPv4 may lead to a router by its IPv6 address.
func TestTurnedByARouterOfIPv6(t *testing.T) {
	w := newWorldAt(t, turning, ipv4)
	turned(t, w, turning, layers.IPProtocolTCP)
	router := netip.MustParseAddr("2001:db8:86dd:50::2")
	mac := net.HardwareAddr{2, 6, 6, 6, 6, 6}
	lab.Must(t, w.node.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: int(w.index("eth0")), State: netlink.NUD_PERMANENT, IP: router.AsSlice(), HardwareAddr: mac,
	}))
	remote := ipv4.prefix("8.0.2.7/32")
	route := &netlink.Route{
		LinkIndex: int(w.index("eth0")), Dst: &net.IPNet{IP: remote.Addr().AsSlice(), Mask: net.CIDRMask(32, 32)},
		Via: &netlink.Via{AddrFamily: unix.AF_INET6, Addr: router.AsSlice()},
	}
	lab.Must(t, w.node.Netlink().RouteAdd(route))
	t.Cleanup(func() { lab.Must(t, w.node.Netlink().RouteDel(route)) })
	outside := mustStation(t, w.outside, "eth0")
	w.attach(t, "eth0", netlink.HANDLE_MIN_INGRESS, w.programs(t, turning).Ingress)
	in := tcp(client, clusterIP, "S")
	outside.send(t, in.frame(ipv4, ends{src: macOf(in.src.Addr()), dst: w.links["eth0"].Attrs().HardwareAddr}), gsoNone, 0)
	got, _ := outside.receive(t, in.from(node).to(remotePod), ipv4)
	if to := net.HardwareAddr(got[:6]); to.String() != mac.String() {
		t.Errorf("it went to %s, want %s", to, mac)
	}
	w.holds(t, 2, true)
}
