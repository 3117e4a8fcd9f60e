package bpf

import (
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
// answer. Only datagrams that go on hold it for two minutes.
func TestMasqueradePortOfADatagram(t *testing.T) {
	for _, test := range []struct {
		name             string
		answered, goesOn bool
		held             time.Duration
	}{
		{"without an answer", false, false, 30 * time.Second},
		{"with an answer", true, false, 30 * time.Second},
		{"that goes on", true, true, 120 * time.Second},
	} {
		t.Run("it is held by one "+test.name, func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
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
				w.wait(t, test.held-time.Second)
				w.ingress(t, p, udp(stranger, clusterIP)).drops(maps.ReasonDropMasqueradePort)
				w.wait(t, 2*time.Second)
				c.place.client = stranger
				c.first(t, maps.ReasonTranslated)
			}, onePort)
		})
	}
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
