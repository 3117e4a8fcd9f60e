package bpf

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// First packets whose source is not behind the device by which they come: a gateway forwards them, or a pod
// has forged them.

// victims are sources that are not behind a device at which their packets come.
var victims = []struct {
	name   string
	at     place // where the packets come
	source string
	here   place // behind which the source is
}{
	{"a pod of another node, at a pod's device", podVeth, "8.0.2.11:40000", uplink},
	{"another pod of this node, at a pod's device", podVeth, "8.0.6.3:40000", podTun},
	{"a host outside, at a pod's device", podPort, client, uplink},
	{"a pod of this node, at an uplink", uplink, podVeth.client, podVeth},
	{"a pod of this node, at an uplink that turns packets around", turning, podVeth.client, podVeth},
}

// eachVictim runs a test for each transport, victim and family.
func eachVictim(t *testing.T, run func(t *testing.T, w *world, proto layers.IPProtocol, at place, source string, here place), options ...func(*DeviceConfig)) {
	t.Helper()
	for _, proto := range transports {
		for _, victim := range victims {
			t.Run(fmt.Sprintf("%s of %s", proto, victim.name), func(t *testing.T) {
				each(t, []place{victim.at}, func(t *testing.T, w *world, p place) {
					run(t, w, proto, p, victim.source, victim.here)
				}, options...)
			})
		}
	}
}

// What a gateway forwards for others gets a backend, and the answers of it come from the Service.
func TestForeignSourceIsTranslated(t *testing.T) {
	eachVictim(t, func(t *testing.T, w *world, proto layers.IPProtocol, p place, source string, _ place) {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{hostPod}})
		in := first(proto, source, clusterIP)
		w.goesTo(t, p, in, hostPod)
		seen := maps.Port(w.flowOf(t, source, clusterIP).StackPort)
		w.ingress(t, p, in).becomes(in.fromPort(seen).to(hostPod), maps.ReasonFlow)
		for _, said := range []struct{ answer, next packet }{
			{answer(proto, hostPod, source), second(proto, source, clusterIP)},
			{third(proto, hostPod, source), second(proto, source, clusterIP)},
		} {
			w.egress(t, p, said.answer.toPort(seen)).becomes(said.answer.from(clusterIP), maps.ReasonFlow)
			w.ingress(t, p, said.next).becomes(said.next.fromPort(seen).to(hostPod), maps.ReasonFlow)
		}
		w.holds(t, 2, false)
	})
}

// So it is with a backend on another node, which sees the node unless the source is one of a pod here. And the client that
// has the source is nowhere kept from what is its own.
func TestForeignSourceOfARemoteBackend(t *testing.T) {
	eachVictim(t, func(t *testing.T, w *world, proto layers.IPProtocol, p place, source string, here place) {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})
		in := first(proto, source, clusterIP)
		w.goesTo(t, p, in, remotePod)
		f := w.flowOf(t, source, clusterIP)
		seen, port := maps.Port(f.StackPort), maps.Port(f.MasqueradePort)
		if seen == at(source).Port() || f.IsMasqueraded() == (here == podTun) {
			t.Errorf("the stack sees port %d, masqueraded is %v", seen, f.IsMasqueraded())
		}
		own := []packet{answer(proto, remotePod, source).acks(77).bearing("victim's"), third(proto, remotePod, source).acks(78).bearing("victim's")}
		for _, said := range []struct{ asked, answer packet }{
			{in, answer(proto, remotePod, source)},
			{second(proto, source, clusterIP), third(proto, remotePod, source)},
		} {
			for _, in := range own {
				w.egress(t, here, in).passes(maps.ReasonPassOtherTraffic)
			}
			w.ingress(t, p, said.asked).becomes(said.asked.fromPort(seen).to(remotePod), maps.ReasonFlow)
			if f.IsMasqueraded() {
				out := said.asked.fromPort(seen).to(remotePod)
				w.egress(t, uplink, out).becomes(out.from(node).fromPort(port), maps.ReasonFlow)
				back := said.answer.to(node).toPort(port)
				w.ingress(t, uplink, back).becomes(back.to(source).toPort(seen), maps.ReasonFlow)
			}
			w.egress(t, here, said.answer.toPort(seen)).becomes(said.answer.from(clusterIP), maps.ReasonFlow)
		}
		w.wait(t, 2*time.Second)
		here.client = source
		c := &conversation{w: w, place: here, proto: proto, vip: clusterIP, backend: remotePod}
		c.first(t, maps.ReasonTranslated)
		c.masqueradedPort = maps.Port(w.flowOf(t, source, clusterIP).MasqueradePort)
		c.establish(t)
		c.says(t, second(proto, source, clusterIP))
	})
}

// Whether the datagrams of an open flow are those of another host is looked for once a second. Meanwhile the client that has
// the source has its answers by this flow.
func TestSenderOfAnOpenForeignFlow(t *testing.T) {
	each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
		const source = "8.0.2.11:40000"
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{hostPod}})
		in := udp(source, clusterIP)
		w.goesTo(t, p, in, hostPod)
		seen := maps.Port(w.flowOf(t, source, clusterIP).StackPort)
		hears := func() {
			t.Helper()
			w.egress(t, uplink, udp(hostPod, source).toPort(seen)).becomes(udp(clusterIP, source), maps.ReasonFlow)
		}
		hears()
		for _, from := range []place{p, uplink} {
			w.ingress(t, from, in).becomes(in.fromPort(seen).to(hostPod), maps.ReasonFlow)
			hears()
		}
		w.wait(t, 1100*time.Millisecond)
		w.ingress(t, p, in).becomes(in.fromPort(seen).to(hostPod), maps.ReasonFlow)
		w.wait(t, 1100*time.Millisecond)
		hears() // what the backend sends changes nothing of that
		w.ingress(t, uplink, in).becomes(in.to(hostPod), maps.ReasonTranslated)
	})
}

// A CNI may route to its pods by a device of its own, to which nothing is attached, and hand packets on to their devices from
// there, as Cilium does by cilium_host. Such pods are behind their devices.
func TestClientBehindADeviceOfItsCNI(t *testing.T) {
	pod := podVeth
	pod.client = "8.0.9.3:40000"
	for _, proto := range transports {
		each(t, []place{pod}, func(t *testing.T, w *world, p place) {
			for _, backend := range []string{portPod, remotePod} {
				vip := map[string]string{portPod: clusterIP, remotePod: otherIP}[backend]
				w.serve(t, service{at: []string{vip}, proto: proto, to: []string{backend}})
				c := &conversation{w: w, place: p, proto: proto, vip: vip, backend: backend}
				c.first(t, maps.ReasonTranslated)
				if f := w.flowOf(t, p.client, vip); f.Flags&maps.FlowOfNode != maps.FlowByPods || f.IsMasqueraded() {
					t.Errorf("its flow has the flags %#x", f.Flags)
				}
				c.establish(t)
			}
		})
	}
	t.Run("and what comes by an uplink in its name is foreign", func(t *testing.T) {
		each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
			w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
			w.goesTo(t, p, tcp(pod.client, clusterIP, "S"), portPod)
			if f := w.flowOf(t, pod.client, clusterIP); f.Flags&maps.FlowOfNode != 0 {
				t.Errorf("its flow has the flags %#x", f.Flags)
			}
		})
	})
}

// What the backend sends to the source itself passes, before the first packet is answered and after.
func TestForeignSourceKeepsItsOwnPackets(t *testing.T) {
	eachVictim(t, func(t *testing.T, w *world, proto layers.IPProtocol, p place, source string, here place) {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
		w.goesTo(t, p, first(proto, source, clusterIP), portPod)
		seen := maps.Port(w.flowOf(t, source, clusterIP).StackPort)
		own := []packet{
			answer(proto, portPod, source).acks(77).bearing("victim's"),
			third(proto, portPod, source).acks(78).bearing("victim's"),
			ofTransport(proto, portPod, source, "R", chunkAbort, "an error").bearing("victim's"),
		}
		pass := func(when string) {
			t.Helper()
			for _, in := range own {
				if o := w.egress(t, here, in); o.reasons[maps.ReasonPassOtherTraffic] != 1 {
					t.Errorf("%s: reasons are %v", when, o.reasons)
				}
			}
		}
		pass("before the answer")
		forged := answer(proto, portPod, source).toPort(seen)
		w.egress(t, here, forged).becomes(forged.from(clusterIP).to(source), maps.ReasonFlow)
		pass("after the answer")
	})
}

// Nor does a flow that the source begins itself, at the device behind which it is, share anything with the foreign one.
func TestForeignFlowIsReplaced(t *testing.T) {
	eachVictim(t, func(t *testing.T, w *world, proto layers.IPProtocol, p place, source string, here place) {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{hostPod}})
		in := first(proto, source, clusterIP).numbered(1 << 20)
		w.goesTo(t, p, in, hostPod)
		here.client = source
		c := &conversation{w: w, place: here, proto: proto, vip: clusterIP, backend: hostPod}
		c.first(t, maps.ReasonTranslated)
		c.establish(t)
		// And from then on, the others are not of it.
		o := w.ingress(t, p, in)
		if p.class != here.class {
			o.drops(maps.ReasonDropTupleTaken)
		}
		c.says(t, second(proto, source, clusterIP))
		c.hears(t, third(proto, hostPod, source))
	})
}

// A client that comes by another class of devices than before, behind which it now is, opens its connections there. Its
// exchange of datagrams goes on, if the answers pass this node.
func TestClientThatHasMoved(t *testing.T) {
	for _, proto := range transports {
		each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
			w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{hostPod}})
			c := &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: hostPod}
			c.first(t, maps.ReasonTranslated)
			c.establish(t)
			for _, e := range w.entries(t) { // the flow is said to be of the uplink's client
				e.flow.Flags = e.flow.Flags&^maps.FlowOfNode | maps.FlowByUplinks
				w.put(t, e)
			}
			w.wait(t, time.Second)
			want := maps.ReasonTranslated
			if proto == layers.IPProtocolUDP {
				want = maps.ReasonFlow
			}
			c.first(t, want)
		})
	}
	t.Run("past whom answers would go", func(t *testing.T) {
		each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
			begin(t, w, p, layers.IPProtocolUDP, remotePod)
			for _, e := range w.entries(t) { // the flow is said to be of a pod of this node
				e.flow.Flags = e.flow.Flags&^(maps.FlowOfNode|maps.FlowMasqueraded|maps.FlowTurned) | maps.FlowByPods
				w.put(t, e)
			}
			if o := w.ingress(t, p, udp(p.client, clusterIP)); o.reasons[maps.ReasonTranslated] != 1 {
				t.Errorf("reasons are %v", o.reasons)
			}
			if !w.flowOf(t, p.client, clusterIP).IsMasqueraded() {
				t.Error("its client is not masqueraded")
			}
		})
	})
}

// A port of the window may be one of the source's own: its exchanges go first, also if netfilter does not track them.
func TestForeignFlowYieldsToADatagram(t *testing.T) {
	each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
		const source = "8.0.2.11:20000"
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		w.goesTo(t, p, udp("8.0.2.11:40000", clusterIP), portPod)
		w.ingress(t, uplink, udp(source, portPod)).passes(maps.ReasonPassNoFrontend)
		w.egress(t, uplink, udp(portPod, source)).passes(maps.ReasonPassOtherTraffic)
		w.holds(t, 0, true)
	}, onePort)
}

// A socket that is translated when it connects may have the port of one that was not, and whose flow is still there: the
// answers are its own. If it was the same one, it goes on by a new flow.
func TestFlowYieldsToADirectExchange(t *testing.T) {
	for _, answered := range []bool{false, true} {
		each(t, podPlaces, func(t *testing.T, w *world, p place) {
			c := begin(t, w, p, layers.IPProtocolUDP, hostPod)
			if answered {
				c.establish(t)
			}
			for range 2 {
				w.ingress(t, p, udp(p.client, hostPod)).passes(maps.ReasonPassNoFrontend)
				w.egress(t, p, udp(hostPod, p.client)).passes(maps.ReasonPassOtherTraffic)
			}
			c.first(t, maps.ReasonTranslated)
			c.establish(t)
		})
	}
}

// A device below another one, as below an ipvlan, translates a datagram, and the other one sees what it became: its
// flow stays. A datagram whose sender is not behind the device ends no flow either.
func TestFlowOutlivesItsOwnDatagrams(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.isAbove(t, "eth0")
		c := begin(t, w, p, layers.IPProtocolUDP, hostPod)
		for _, seen := range []place{uplink, podVeth} {
			if seen.class == maps.DevicePods && p.class == maps.DevicePods {
				continue // one that the client is behind: TestFlowYieldsToADirectExchange
			}
			w.ingress(t, seen, udp(p.client, hostPod)).passes(maps.ReasonPassNoFrontend)
		}
		c.establish(t)
	})
}

// At an uplink, a first packet to a Service shows no more of who has sent it than one to a backend. So what goes to a
// backend and a flow that has the same client, port and backend go on side by side, whichever of them is forged.
func TestExchangeBesideAFlow(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		for _, answered := range []bool{false, true} {
			for _, backend := range []string{portPod, hostPod} {
				t.Run(fmt.Sprintf("%s to %s, answered: %t", proto, backend, answered), func(t *testing.T) {
					each(t, uplinks, func(t *testing.T, w *world, p place) {
						c := begin(t, w, p, proto, backend)
						if answered {
							c.establish(t)
						}
						asks := first(proto, p.client, backend).numbered(1 << 20)
						o := w.ingress(t, p, asks)
						port := maps.Port(w.flowOf(t, p.client, backend).StackPort)
						if port == at(p.client).Port() {
							t.Fatal("the backend sees the port of the flow")
						}
						o.becomes(asks.fromPort(port), maps.ReasonTranslated)
						hears := answer(proto, backend, p.client).acks(1<<20 + 1)
						w.egress(t, p, hears.toPort(port)).becomes(hears, maps.ReasonFlow)
						if !answered {
							c.establish(t)
						}
						for range 2 {
							asks = second(proto, p.client, backend).numbered(1<<20 + 1)
							w.ingress(t, p, asks).becomes(asks.fromPort(port), maps.ReasonFlow)
							hears = third(proto, backend, p.client).acks(1<<20 + 1)
							w.egress(t, p, hears.toPort(port)).becomes(hears, maps.ReasonFlow)
							c.says(t, second(proto, p.client, clusterIP))
							c.hears(t, third(proto, backend, p.client))
						}
						lab.Must(t, w.maps.Backends.Put(maps.Index(w.flowOf(t, p.client, clusterIP).BackendId), maps.Backend{}))
						w.wait(t, 2*time.Second)
						asks = second(proto, p.client, backend).numbered(1<<20 + 1)
						w.ingress(t, p, asks).becomes(asks.fromPort(port), maps.ReasonFlow)
					})
				})
			}
		}
	}
}

// A flow that has expired holds nothing against an exchange with its backend.
func TestExchangeAfterAFlow(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		begin(t, w, p, layers.IPProtocolUDP, portPod)
		for _, e := range w.entries(t) {
			e.flow.Created -= uint64(time.Hour)
			e.flow.LastSeen -= uint64(time.Hour)
			w.put(t, e)
		}
		w.ingress(t, p, udp(p.client, portPod)).passes(maps.ReasonPassNoFrontend)
		w.egress(t, p, udp(portPod, p.client)).passes(maps.ReasonPassOtherTraffic)
		w.holds(t, 0, true)
	})
}

// A foreign flow takes no tuple of an exchange that netfilter tracks, answered or not.
func TestForeignFlowAvoidsNetfilter(t *testing.T) {
	needsConntrack(t)
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		each(t, []place{podVeth}, func(t *testing.T, w *world, p place) {
			w.track(t, proto, "8.0.2.11:20000", portPod, "8.0.2.11:20000", conntrackSynSent)
			w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
			w.goesTo(t, p, first(proto, "8.0.2.11:40000", clusterIP), portPod)
			if port := maps.Port(w.flowOf(t, "8.0.2.11:40000", clusterIP).StackPort); port != 20001 {
				t.Errorf("port is %d, and the tuple is that of another exchange", port)
			}
		}, twoPorts)
	}
}

// The outcome of a foreign flow shows nothing of its backend, which has answered others: neither silence, nor an answer, nor a
// refusal.
func TestForeignFlowIsNoEvidence(t *testing.T) {
	eachVictim(t, func(t *testing.T, w *world, proto layers.IPProtocol, p place, source string, here place) {
		for vip, refuses := range map[string]bool{clusterIP: false, otherIP: true} {
			s := w.serve(t, service{at: []string{vip}, proto: proto, to: []string{portPod}})
			id := s.backends[portPod]
			known := maps.BackendHealth{Id: id, Answered: now(t) - uint64(10*time.Second)}
			lab.Must(t, w.maps.Health.Put(maps.Index(id), known))
			shows := func(what string) {
				t.Helper()
				if h, _ := w.maps.HealthOf(id); h != known {
					t.Errorf("%s speaks for or against the backend: %+v", what, h)
				}
			}
			in := first(proto, source, vip)
			w.goesTo(t, p, in, portPod)
			shows("the first packet")
			seen := maps.Port(w.flowOf(t, source, vip).StackPort)
			w.wait(t, 1100*time.Millisecond)
			w.ingress(t, p, in).becomes(in.fromPort(seen).to(portPod), maps.ReasonFlow)
			shows("the first packet, sent again")
			said := answer(proto, portPod, source)
			if refuses {
				said = ofTransport(proto, portPod, source, "R.", chunkAbort, "")
			}
			w.egress(t, here, said.toPort(seen)).ends(verdictNext, maps.ReasonFlow)
			shows(fmt.Sprintf("the answer, a refusal: %t,", refuses))
		}
	}, func(c *DeviceConfig) { c.Heal = true })
}

// What a half-open flow of a source that is where it should be translates is that flow's own. Another connection
// of the same tuple passes: another host of the same network may have forged the first packet.
func TestHalfOpenFlowTranslatesItsAnswers(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolSCTP} {
		each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
			c := begin(t, w, p, proto, portPod)
			for _, in := range []packet{
				answer(proto, client, client).acks(1 << 20).bearing("victim's"),
				ofTransport(proto, client, client, "P.", chunkCookieAck, "").with("data").acks(1<<20 + 1).bearing("victim's"),
				ofTransport(proto, client, client, "R", chunkAbort, "").acksNothing().bearing("victim's"),
				ofTransport(proto, client, client, "R.", chunkAbort, "").acks(1<<20 + 1).reflecting("victim's"),
			} {
				c.sendsElsewhere(t, in)
			}
			c.establish(t)
		})
	}
	t.Run("on the way to the backend", func(t *testing.T) {
		for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolSCTP} {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, proto, remotePod)
				for _, in := range []packet{
					first(proto, p.client, remotePod).numbered(1 << 20).with("victim's"),
					second(proto, p.client, remotePod).bearing("victim's"),
				} {
					w.egress(t, uplink, in).passes(maps.ReasonPassOtherTraffic)
				}
				c.establish(t)
			})
		}
	})
}

// A kernel that still has a connection from before answers a SYN with a bare ACK of its numbers. The client, which gets
// it from the Service, resets that connection, and its next SYN begins anew.
func TestAnswerOfAnEarlierConnection(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.hears(t, tcp(client, client, ".").acks(1<<20))
		c.says(t, tcp(client, client, "R").numbered(1<<20))
		c.says(t, tcp(client, client, "S"))
		c.establish(t)
	})
	t.Run("masqueraded by way of the stack", func(t *testing.T) {
		each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
			c := begin(t, w, p, layers.IPProtocolTCP, remotePod)
			c.leaves(t, tcp(client, client, "S"))
			c.leaves(t, tcp(client, client, "R").numbered(1<<20))
		})
	})
}

// The SYN of a client that had sent data with it is sent again without, and the backend acknowledges the data.
func TestAnswerToDataOfASYN(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.hears(t, tcp(client, client, "S.").acks(500))
	})
}

// The later fragments of an answer that is not the flow's pass with the first.
func TestFragmentsOfAnotherConnection(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		begin(t, w, p, layers.IPProtocolTCP, portPod)
		for i, part := range pieces(tcp(portPod, p.client, "P.").acks(1 << 20).long(2999)) {
			why := maps.ReasonPassOtherTraffic
			if i > 0 {
				why = maps.ReasonPassFragment
			}
			w.egress(t, p, part).passes(why)
		}
	})
}

// No client has the address of a Service, of a group or of all hosts, none, or loopback.
func TestSourcesOfNoClient(t *testing.T) {
	const secondIP, empty = "8.0.96.2:80", "8.0.96.5:80"
	for _, test := range []struct {
		name, source string
		only         family
		passes       bool
		handshakes   bool // what has one cannot go on for ever, and passes
	}{
		{name: "a ClusterIP", source: "8.0.96.2:80"},
		{name: "another port of a ClusterIP", source: "8.0.96.2:40000"},
		{name: "an external address, and its port", source: "8.0.30.1:80", handshakes: true},
		{name: "a load balancer that connects from its own address", source: "8.0.30.1:40000", passes: true},
		{name: "a group", source: "224.0.0.9:40000"},
		{name: "none", source: "0.0.0.0:40000"},
		{name: "this network", source: "0.1.2.3:40000", only: ipv4},
		{name: "all hosts", source: "255.255.255.255:40000", only: ipv4},
		{name: "loopback", source: "127.0.0.1:40000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, append(ways, podVeth), func(t *testing.T, w *world, p place) {
				if test.only != 0 && test.only != w.family {
					return
				}
				for _, proto := range transports {
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod, portPod}})
					w.serve(t, service{at: []string{secondIP}, proto: proto, to: []string{portPod}})
					w.serve(t, service{at: []string{empty}, proto: proto})
					w.serve(t, service{at: []string{balancer}, proto: proto, kind: maps.KindLoadBalancer, to: []string{portPod}})
					in := first(proto, test.source, clusterIP)
					if o := w.ingress(t, p, in); !test.passes && !(test.handshakes && proto != layers.IPProtocolUDP) {
						o.drops(maps.ReasonDropSource)
						w.ingress(t, p, in.to(empty)).drops(maps.ReasonDropSource)
					} else if o.reasons[maps.ReasonTranslated] != 1 {
						t.Errorf("reasons are %v", o.reasons)
					}
				}
			})
		})
	}
}

// A ClusterIP that the node has itself is a client as well: NodeLocal DNSCache.
func TestSourceThatTheNodeHas(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		w.serve(t, service{at: []string{otherIP}, to: []string{portPod}})
		a := w.mapAddr(otherIP)
		if err := w.hand.Mark(a, maps.AddrService|maps.AddrNode, w.index("eth0")); err != nil {
			t.Fatal(err)
		}
		from := netip.AddrPortFrom(at(otherIP).Addr(), 40000).String()
		if o := w.ingress(t, p, tcp(from, clusterIP, "S")); o.reasons[maps.ReasonTranslated] != 1 {
			t.Errorf("reasons are %v", o.reasons)
		}
	})
}
