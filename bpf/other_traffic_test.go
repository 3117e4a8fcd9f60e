package bpf

import (
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// otherTraffic returns packets to addresses of no Service.
func otherTraffic() map[string]packet {
	const from = "8.0.100.1:40000"

	return map[string]packet{
		"TCP":                        tcp(from, otherServer, "S"),
		"TCP in the middle":          tcp(from, otherServer, "P.").with("data"),
		"UDP":                        udp(from, otherServer),
		"UDP without a checksum":     udp(from, otherServer).withoutSum(),
		"SCTP":                       sctp(from, otherServer, chunkInit),
		"a ping":                     ping(from, otherServer),
		"another protocol":           protocol(50, from, otherServer),
		"a fragment":                 udp(from, otherServer).long(3000).fragment(0, 1024),
		"a later fragment":           udp(from, otherServer).long(3000).rest(1024),
		"options":                    tcp(from, otherServer, "S").withExtras(3),
		"a VLAN tag":                 tcp(from, otherServer, "S").tagged(5),
		"two VLAN tags":              tcp(from, otherServer, "S").tagged(5, 6),
		"an error about a flow":      icmpError(tooBig, router, otherServer, tcp(clusterIP, client, ".")),
		"a multicast":                udp(from, "224.0.0.1:5353"),
		"a broadcast frame":          udp(from, otherServer).broadcast(),
		"a client of a known flow":   tcp(client, otherServer, "S"),
		"a backend's own connection": tcp(portPod, otherServer, "S"),
		"a frame that is filled":     tcp(from, otherServer, "S").padded(20),
	}
}

// Other traffic passes unchanged, whatever it is.
func TestOtherTraffic(t *testing.T) {
	for name, in := range otherTraffic() {
		t.Run(name, func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
				c.establish(t)
				w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{tapPod}})
				if p.noEthernet {
					in = in.tagged()
					in.padding = 0
				}
				w.ingress(t, p, in).passes(maps.ReasonPassOtherTraffic)
			})
		})
	}
}

// Frames other than IP pass unchanged, whatever their bytes.
func TestOtherEtherTypes(t *testing.T) {
	each(t, ethernets, func(t *testing.T, w *world, p place) {
		c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
		c.establish(t)
		for _, ether := range []layers.EthernetType{0x0806, 0x88cc, 0x8847, 0x8863, 0x0001} {
			in := tcp(client, clusterIP, "S")
			in.ether = ether
			w.ingress(t, p, in).passes(maps.ReasonPassOtherTraffic)
			w.ingress(t, p, in.tagged(3)).passes(maps.ReasonPassOtherTraffic)
		}
		w.ingress(t, p, tcp(client, clusterIP, "S").tagged(1, 2, 3)).passes(maps.ReasonPassOtherTraffic)
	})
}

// The node's own traffic on ports other than node ports passes unchanged.
func TestTrafficOfTheNode(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{tapPod}})
		for _, test := range []struct {
			in  packet
			why maps.Reason
		}{
			{tcp(p.client, node, "S").toPort(22), maps.ReasonPassNoFrontend},
			{tcp(p.client, node, ".").toPort(22), maps.ReasonPassNoFrontend},
			{tcp(p.client, node, ".").toPort(30080), maps.ReasonPassNoFlow},
			{udp(p.client, node).toPort(30080), maps.ReasonPassNoFrontend},
			{udp(p.client, node).toPort(15000), maps.ReasonPassNoFrontend},
			{sctp(p.client, node, chunkInit).toPort(30080), maps.ReasonPassNoFrontend},
			{ping(p.client, node), maps.ReasonPassNoFrontend},
			{protocol(50, p.client, node), maps.ReasonPassNoFrontend},
			{icmpError(tooBig, router, node, tcp(node, p.client, ".").fromPort(22)), maps.ReasonPassNoFlow},
		} {
			w.ingress(t, p, test.in).passes(test.why)
		}
	})
}

// A packet from the stack of no flow passes unchanged.
func TestOtherTrafficAtEgress(t *testing.T) {
	for name, in := range otherTraffic() {
		t.Run(name, func(t *testing.T) {
			each(t, []place{uplink, podTun}, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
				for _, at := range []place{uplink, podVeth} {
					w.ingress(t, at, tcp(at.client, clusterIP, "S")).becomes(tcp(at.client, portPod, "S"), maps.ReasonTranslated)
				}
				if p.noEthernet {
					in = in.tagged()
					in.padding = 0
				}
				why := maps.ReasonPassOtherTraffic
				if in.piece != nil && in.piece.last {
					why = maps.ReasonPassFragment
				}
				if in.quote != nil {
					why = maps.ReasonPassNoFlow
				}
				w.egress(t, p, in).passes(why)
			})
		})
	}
}

// Only a few extension headers are skipped.
func TestTooManyExtensions(t *testing.T) {
	w := newWorld(t, ipv6)
	w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
	w.ingress(t, uplink, tcp(client, clusterIP, "S").withExtras(12)).passes(maps.ReasonPassMalformed)
}

// A GSO packet is translated like any other.
func TestSegmentationOffload(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolUDP} {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, []place{uplink, podTun, podPort}, func(t *testing.T, w *world, p place) {
				w.gsoSize = 500
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{tapPod}})
				converse(t, w, p, proto, tapPod, func(p packet) packet { return p.long(2900) })
			})
		})
	}
}
