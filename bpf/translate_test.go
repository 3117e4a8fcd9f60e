package bpf

import (
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// The first packet to a Service, the answer, and what follows, in each protocol,
// at each kind of device.
func TestServicesAreTranslated(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
				converse(t, w, p, proto, portPod, unchanged)
			})
		})
	}
}

// Kernels that know less need other ways to the same packets.
func TestServicesAreTranslatedOnAnOldKernel(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, []place{uplink, podTun}, func(t *testing.T, w *world, p place) {
				w.unsummed = true // which such a kernel gets wrong, in IPv6
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
				converse(t, w, p, proto, portPod, unchanged)
			}, func(c *DeviceConfig) { c.FIBSource, c.ChecksumIPv6 = false, false })
		})
	}
}

func unchanged(p packet) packet { return p }

// converse has the client of a place talk to the ClusterIP and get answers, in
// packets of a shape.
func converse(t *testing.T, w *world, p place, proto layers.IPProtocol, backend string, shape func(packet) packet) {
	t.Helper()
	w.ingress(t, p, shape(first(proto, p.client, clusterIP))).
		becomes(shape(first(proto, p.client, backend)), maps.ReasonTranslated)
	for range 2 {
		w.egress(t, p, shape(answer(proto, backend, p.client))).
			becomes(shape(answer(proto, clusterIP, p.client)), maps.ReasonFlow)
		w.ingress(t, p, shape(second(proto, p.client, clusterIP))).
			becomes(shape(second(proto, p.client, backend)), maps.ReasonFlow)
	}
}

// converseMasqueraded is converse with a backend on another node.
func converseMasqueraded(t *testing.T, w *world, p place, proto layers.IPProtocol, shape func(packet) packet) {
	t.Helper()
	w.ingress(t, p, shape(first(proto, p.client, clusterIP))).
		becomes(shape(first(proto, p.client, remotePod)), maps.ReasonTranslated)
	port := maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort)
	out := func(what packet) packet { return shape(what.from(node).fromPort(port)) }
	back := func(what packet) packet { return shape(what.to(node).toPort(port)) }

	w.egress(t, uplink, shape(first(proto, p.client, remotePod))).
		becomes(out(first(proto, p.client, remotePod)), maps.ReasonFlow)
	for _, says := range []func(layers.IPProtocol, string, string) packet{answer, third} {
		w.ingress(t, uplink, back(says(proto, remotePod, p.client))).
			becomes(shape(says(proto, remotePod, p.client)), maps.ReasonFlow)
		w.egress(t, p, shape(says(proto, remotePod, p.client))).
			becomes(shape(says(proto, clusterIP, p.client)), maps.ReasonFlow)
		w.ingress(t, p, shape(second(proto, p.client, clusterIP))).
			becomes(shape(second(proto, p.client, remotePod)), maps.ReasonFlow)
		w.egress(t, uplink, shape(second(proto, p.client, remotePod))).
			becomes(out(second(proto, p.client, remotePod)), maps.ReasonFlow)
	}
}

// Whatever a packet looks like around its addresses and ports, it is translated,
// and nothing else of it changes.
func TestShapes(t *testing.T) {
	for _, test := range []struct {
		name  string
		only  layers.IPProtocol
		shape func(packet) packet
	}{
		{name: "with a VLAN tag", shape: func(p packet) packet { return p.tagged(100) }},
		{name: "with two VLAN tags", shape: func(p packet) packet { return p.tagged(7, 4094) }},
		{name: "with an IPv4 option or an extension header", shape: func(p packet) packet { return p.withExtras(1) }},
		{name: "with three of them", shape: func(p packet) packet { return p.withExtras(3) }},
		{name: "with five of them", shape: func(p packet) packet { return p.withExtras(5) }},
		{name: "tagged and with options", shape: func(p packet) packet { return p.tagged(9).withExtras(2) }},
		{name: "of a traffic class", shape: func(p packet) packet { return p.withTOS(0xb9) }},
		{name: "with one hop left", shape: func(p packet) packet { return p.withHops(1) }},
		{name: "empty", shape: func(p packet) packet { return p.filled("") }},
		{name: "of one byte", shape: func(p packet) packet { return p.filled("x") }},
		{name: "in a frame that is filled up", shape: func(p packet) packet { return p.filled("").padded(46) }},
		{name: "long", shape: func(p packet) packet { return p.long(1401) }},
		{name: "without a checksum", only: layers.IPProtocolUDP, shape: packet.withoutSum},
	} {
		for _, proto := range transports {
			if test.only != 0 && test.only != proto {
				continue
			}
			t.Run(fmt.Sprintf("%s %s", proto, test.name), func(t *testing.T) {
				each(t, shapePlaces, func(t *testing.T, w *world, p place) {
					shape := test.shape
					if p.noEthernet {
						shape = func(p packet) packet { return test.shape(p).tagged() }
					}
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
					converse(t, w, p, proto, portPod, shape)
				})
				each(t, shapePlaces[:1], func(t *testing.T, w *world, p place) {
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}})
					converseMasqueraded(t, w, p, proto, test.shape)
				})
			})
		}
	}
}

var shapePlaces = []place{uplink, podTun}

// UDP writes a checksum that comes out as zero as 0xffff, because zero is none.
func TestUDPChecksumIsNeverZero(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		want := udp(p.client, portPod).with("\x00\x00")
		bytes := want.transport(w.family)
		want.payload = string(bytes[6:8]) // now all adds up to 0xffff

		o := w.ingress(t, p, want.to(clusterIP))
		o.becomes(want, maps.ReasonTranslated)
		for _, s := range sums(o.got, true) {
			if s.what == "protocol 17" && (o.got[s.at] != 0xff || o.got[s.at+1] != 0xff) {
				t.Errorf("checksum is %#x, want 0xffff", o.got[s.at:s.at+s.size])
			}
		}
	})
}
