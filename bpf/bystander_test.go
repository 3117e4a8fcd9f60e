package bpf

import (
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// bystanders are packets to addresses that are none of ours.
func bystanders() map[string]packet {
	const from = "8.0.100.1:40000"

	return map[string]packet{
		"TCP":                      tcp(from, bystander, "S"),
		"TCP in the middle":        tcp(from, bystander, "P.").with("data"),
		"UDP":                      udp(from, bystander),
		"UDP without a checksum":   udp(from, bystander).withoutSum(),
		"SCTP":                     sctp(from, bystander, chunkInit),
		"a ping":                   ping(from, bystander),
		"another protocol":         protocol(50, from, bystander),
		"a fragment":               udp(from, bystander).long(3000).fragment(0, 1024),
		"a later fragment":         udp(from, bystander).long(3000).rest(1024),
		"options":                  tcp(from, bystander, "S").withExtras(3),
		"a VLAN tag":               tcp(from, bystander, "S").tagged(5),
		"two VLAN tags":            tcp(from, bystander, "S").tagged(5, 6),
		"an error about a flow":    tell(tooBig, router, bystander, tcp(clusterIP, client, ".")),
		"a multicast":              udp(from, "224.0.0.1:5353"),
		"a broadcast frame":        udp(from, bystander).broadcast(),
		"a client of a known flow": tcp(client, bystander, "S"),
		"a backend's own business": tcp(portPod, bystander, "S"),
		"a frame that is filled":   tcp(from, bystander, "S").padded(20),
	}
}

// What is none of ours passes as it came, whatever it is.
func TestBystanders(t *testing.T) {
	for name, in := range bystanders() {
		t.Run(name, func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
				c.establish(t)
				w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{tapPod}})
				if p.noEthernet {
					in = in.tagged()
					in.padding = 0
				}
				w.ingress(t, p, in).passes(maps.ReasonPassBystander)
			})
		})
	}
}

// What is no IP packet is nobody's business here, whatever its bytes look like.
func TestOtherEtherTypes(t *testing.T) {
	each(t, ethernets, func(t *testing.T, w *world, p place) {
		c := begin(t, w, uplink, layers.IPProtocolTCP, portPod)
		c.establish(t)
		for _, ether := range []layers.EthernetType{0x0806, 0x88cc, 0x8847, 0x8863, 0x0001} {
			in := tcp(client, clusterIP, "S")
			in.ether = ether
			w.ingress(t, p, in).passes(maps.ReasonPassBystander)
			w.ingress(t, p, in.tagged(3)).passes(maps.ReasonPassBystander)
		}
		w.ingress(t, p, tcp(client, clusterIP, "S").tagged(1, 2, 3)).passes(maps.ReasonPassBystander)
	})
}

// The node's own traffic: its addresses are ours, for node ports, but what it
// does with other ports is its own affair.
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
			{tell(tooBig, router, node, tcp(node, p.client, ".").fromPort(22)), maps.ReasonPassNoFlow},
		} {
			w.ingress(t, p, test.in).passes(test.why)
		}
	})
}

// What leaves and is of no flow leaves as it is.
func TestBystandersThatLeave(t *testing.T) {
	for name, in := range bystanders() {
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
				why := maps.ReasonPassBystander
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

// More extension headers than anybody needs are not followed.
func TestTooManyExtensions(t *testing.T) {
	w := newWorld(t, ipv6)
	w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
	w.ingress(t, uplink, tcp(client, clusterIP, "S").withExtras(12)).passes(maps.ReasonPassMalformed)
}

// A packet that is to be cut into segments is translated like any other.
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
