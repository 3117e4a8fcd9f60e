package bpf

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// Packets that look like those of a flow, but belong to another connection.

// Netfilter may masquerade a packet first: then replies to that port are netfilter's, even if a flow has the
// same port.
func TestReplyToAMasqueradeOfNetfilter(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, remotePod)
		reply := tcp(remotePod, node, "S.").toPort(c.masqueradedPort)
		w.ingress(t, p, reply).passes(maps.ReasonPassNoFlow)

		c.leaves(t, tcp(client, client, "S"))
		c.returns(t, tcp(client, client, "S."))
	})
}

// A client may connect to a pod directly, from the port of a connection to its Service that has just ended.
func TestDirectConnectionAfterAFlow(t *testing.T) {
	for name, end := range map[string]func(*conversation, *testing.T){
		"closed": (*conversation).closes,
		"reset":  func(c *conversation, t *testing.T) { c.hears(t, tcp(client, client, "R.")) },
	} {
		t.Run(name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, layers.IPProtocolTCP, portPod)
				c.establish(t)
				end(c, t)
				for _, flags := range []string{"S.", ".", "P.", "F."} {
					w.egress(t, p, tcp(portPod, p.client, flags)).passes(maps.ReasonPassOtherTraffic)
				}
				if left := w.entries(t); len(left) > 0 {
					t.Errorf("%d entries of the flow are left", len(left))
				}
			})
		})
	}
}

// Nor is a direct connection to the old backend, if the client has since reused its port with another
// backend.
func TestDirectConnectionToABackendThatAFlowHasLeft(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.establish(t)
		c.closes(t)
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPodToo}})
		again := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, again).becomes(again.to(portPodToo), maps.ReasonTranslated)

		for _, flags := range []string{"S.", ".", "P.", "F."} {
			w.egress(t, p, tcp(portPod, p.client, flags)).passes(maps.ReasonPassOtherTraffic)
		}
		answer := tcp(portPodToo, p.client, "S.")
		w.egress(t, p, answer).becomes(answer.from(clusterIP), maps.ReasonFlow)
	})
}

// Nor is a direct connection masqueraded because an earlier flow with its tuple was.
func TestDirectConnectionAfterAMasqueradedFlow(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, remotePod)
		c.establish(t)
		for _, said := range closedByClient {
			said.on(t, c)
		}
		for _, flags := range []string{"S", ".", "P."} {
			w.egress(t, p, tcp(p.client, remotePod, flags)).passes(maps.ReasonPassOtherTraffic)
		}
		w.egress(t, p, tcp(remotePod, p.client, "S.")).passes(maps.ReasonPassOtherTraffic)
	})
}

// A promiscuous device, or a switch that floods, delivers frames to other machines.
func TestFrameToAnotherMachine(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		in := tcp(p.client, clusterIP, "S")
		between := ends{src: macOf(in.src.Addr()), dst: net.HardwareAddr{2, 9, 9, 9, 9, 9}}
		w.run(t, w.programs(t, p).Ingress, p, in, between).passes(maps.ReasonPassOtherTraffic)
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
	})
}

// A client that only sends keeps its masquerade port.
func TestMasqueradePortOfAClientThatOnlySends(t *testing.T) {
	window := func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20000} }
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
		c := &conversation{w: w, place: p, proto: layers.IPProtocolUDP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
		c.first(t, maps.ReasonTranslated)
		c.establish(t)
		for range 3 {
			w.wait(t, 60*time.Second)
			c.says(t, udp(client, client))
			c.leaves(t, udp(client, client))
		}
		w.ingress(t, p, udp(stranger, clusterIP)).drops(maps.ReasonDropMasqueradePort)
		c.returns(t, udp(client, client))
	}, window)
}

// A datagram and its answer hold a masquerade port for half a minute, as netfilter holds one, and so does one that has no
// answer, unless no other port is free. Datagrams that go on hold it for two minutes, whatever else is free.
func TestMasqueradePortOfADatagram(t *testing.T) {
	for _, test := range []struct {
		name             string
		answered, goesOn bool
		roomless         bool // flows has no room for it
		hold             held // for a time
		time             time.Duration
	}{
		{name: "without an answer", hold: lastResort, time: 30 * time.Second},
		{name: "with an answer", answered: true, hold: lastResort, time: 30 * time.Second},
		{name: "that goes on", answered: true, goesOn: true, hold: live, time: 120 * time.Second},
		{name: "that goes on without room", answered: true, goesOn: true, roomless: true, hold: live, time: 120 * time.Second},
		{name: "that goes on without an answer", goesOn: true, hold: lastResort, time: 30 * time.Second},
	} {
		for _, later := range []bool{false, true} {
			t.Run(fmt.Sprintf("it is held by one %s, later: %v", test.name, later), func(t *testing.T) {
				each(t, ways, func(t *testing.T, w *world, p place) {
					if test.roomless {
						w.use(t, w.room(t), w.room(t))
						defer w.use(t, 0, 0)
					}
					w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
					c := &conversation{w: w, place: p, proto: layers.IPProtocolUDP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
					c.first(t, maps.ReasonTranslated)
					if test.answered {
						c.establish(t)
					}
					if test.goesOn {
						w.wait(t, 3*time.Second)
						c.says(t, udp(client, client))
						c.leaves(t, udp(client, client))
					}
					if test.goesOn && test.answered {
						c.hears(t, udp(client, client))
					}
					w.wait(t, test.time-time.Second)
					hold := test.hold
					if later {
						w.wait(t, 2*time.Second)
						hold = free
					}
					in := udp(stranger, clusterIP)
					if hold == live {
						w.ingress(t, p, in).drops(maps.ReasonDropMasqueradePort)

						return
					}
					other := *c
					other.place.client = stranger
					counts := w.counted(t, func() { other.goesOn(w.ingress(t, p, in), maps.ReasonTranslated) })
					if forced := counts.MasqueradeRetries != 0; forced != (hold == lastResort) {
						t.Errorf("the port was given away after %d tries", counts.MasqueradeRetries)
					}
					other.establish(t)
					w.holds(t, c.entryCount(), test.roomless)
				}, onePort)
			})
		}
	}
}

// A flood of datagrams, each of which is answered once or not at all, leaves all clients their exchanges, also if it has
// taken all ports to the backend within half a minute: of what is no stream, the oldest yields.
func TestMasqueradePortsInAFlood(t *testing.T) {
	const ports, streams, flood, clients = 1024, 8, 1200, 100
	for _, answered := range []bool{true, false} {
		t.Run(fmt.Sprintf("answered: %v", answered), func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
				begun := func(from string) *conversation {
					c := &conversation{w: w, place: p, proto: layers.IPProtocolUDP, vip: clusterIP, backend: remotePod}
					c.place.client = from
					o := w.ingress(t, p, udp(from, clusterIP))
					if o.reasons[maps.ReasonTranslated] != 1 {
						t.Fatalf("the first datagram of %s: reasons are %v", from, o.reasons)
					}
					c.masqueradedPort = maps.Port(w.flowOf(t, from, clusterIP).MasqueradePort)

					return c
				}
				talk := func(c *conversation) {
					c.leaves(t, udp(client, client))
					c.returns(t, udp(client, client))
				}
				var going []*conversation
				for i := range streams {
					going = append(going, begun(clientAt(i)))
					talk(going[i])
				}
				w.wait(t, 3*time.Second)
				for _, c := range going {
					c.says(t, udp(client, client))
					talk(c)
				}
				for i := range flood {
					c := begun(fmt.Sprintf("8.0.101.%d:%d", 1+i%200, 42000+i))
					if answered {
						talk(c)
					} else {
						c.leaves(t, udp(client, client))
					}
					if i%200 == 199 {
						w.wait(t, 4*time.Second)
					}
				}
				for i := range clients {
					going = append(going, begun(clientAt(streams+i)))
				}
				for range 2 {
					for _, c := range going {
						talk(c)
						c.says(t, udp(client, client))
					}
				}
			}, func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20000 + ports - 1} })
		})
	}
}

// The kernel may give an entry that was found in half_open to another flow before it is read, once another CPU has
// moved its flow to flows: the flow is found there.
func TestEntryGivenToAnotherFlow(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		if c.proto == layers.IPProtocolUDP {
			return // any datagram is looked up in flows first
		}
		c.establish(t)
		e := c.w.role(t, maps.FlowFromClient)
		e.halfOpen, e.flow.ClientPort = true, maps.Port(4711)
		c.w.put(t, e)
		c.first(t, maps.ReasonFlow)
		c.says(t, second(c.proto, c.place.client, c.vip))
	})
}

// A backend that is gone may answer after the client got another one.
func TestLateAnswerOfABackendThatIsGone(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		first := w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		in := udp(p.client, clusterIP)
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
		w.removeBackend(t, first, portPod)
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPodToo}})
		w.wait(t, 2*time.Second)
		w.ingress(t, p, in).becomes(in.to(portPodToo), maps.ReasonTranslated)

		late := udp(portPod, p.client)
		w.egress(t, p, late).becomes(late.from(clusterIP), maps.ReasonFlow)
		w.ingress(t, p, in).becomes(in.to(portPodToo), maps.ReasonFlow)
	})
}
