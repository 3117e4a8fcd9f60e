package bpf

import (
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// pieces cuts a datagram in three.
func pieces(p packet) []packet {
	return []packet{p.fragment(0, 1024), p.fragment(1024, 1024), p.rest(2048)}
}

// Fragments go where the first one goes. The checksum in the first one covers all of them, so the expected
// fragments are cut from the translated datagram.
func TestFragmentsFollowTheFirst(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolUDP, layers.IPProtocolTCP} {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{tapPod}})
				in := first(proto, p.client, clusterIP).long(3001)
				want := pieces(in.to(tapPod))
				for i, part := range pieces(in) {
					why := maps.ReasonFlow
					if i == 0 {
						why = maps.ReasonTranslated
					}
					w.ingress(t, p, part).becomes(want[i], why)
				}
				out := answer(proto, tapPod, p.client).long(2999)
				want = pieces(out.from(clusterIP))
				for i, part := range pieces(out) {
					w.egress(t, p, part).becomes(want[i], maps.ReasonFlow)
				}
			})
		})
	}
}

// All four directions of a masqueraded flow, in frames of every shape.
func TestFragmentsOfMasqueradedFlows(t *testing.T) {
	for name, shape := range map[string]func(packet) packet{
		"plain": unchanged, "tagged": func(p packet) packet { return p.tagged(12) },
		"with options": func(p packet) packet { return p.withExtras(1) }, "without a checksum": packet.withoutSum,
	} {
		t.Run(name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
				all := func(hook func(testing.TB, place, packet) outcome, in, want packet) {
					t.Helper()
					for i, part := range pieces(shape(in)) {
						o := hook(t, p, part)
						why := maps.ReasonFlow
						if o.reasons[maps.ReasonTranslated] > 0 && i == 0 {
							why = maps.ReasonTranslated
						}
						o.becomes(pieces(shape(want))[i], why)
					}
				}
				in := udp(client, clusterIP).long(2500)
				all(w.ingress, in, in.to(remotePod))
				port := maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
				all(w.egress, in.to(remotePod), in.to(remotePod).from(node).fromPort(port))
				reply := udp(remotePod, node).toPort(port).long(2222)
				all(w.ingress, reply, reply.to(client))
				all(w.egress, reply.to(client), reply.to(client).from(clusterIP))
			})
		})
	}
}

// A fragment that arrives before the first one passes untranslated: its ports are unknown.
func TestFragmentsOutOfOrder(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{tapPod}})
		in := udp(p.client, clusterIP).long(3000)
		want := pieces(in.to(tapPod))
		parts := pieces(in)
		w.ingress(t, p, parts[1]).passes(maps.ReasonPassFragment)
		w.ingress(t, p, parts[0]).becomes(want[0], maps.ReasonTranslated)
		w.ingress(t, p, parts[2]).becomes(want[2], maps.ReasonFlow)
		w.ingress(t, p, parts[1]).becomes(want[1], maps.ReasonFlow)

		out := udp(tapPod, p.client).long(3000)
		w.egress(t, p, pieces(out)[2]).passes(maps.ReasonPassFragment)
		w.egress(t, p, pieces(out)[0]).becomes(pieces(out.from(clusterIP))[0], maps.ReasonFlow)
		w.egress(t, p, pieces(out)[2]).becomes(pieces(out.from(clusterIP))[2], maps.ReasonFlow)

		// Nor does it belong to a datagram of another protocol, which has its own ids.
		w.ingress(t, p, tcp(p.client, clusterIP, ".").long(3000).fragment(1024, 1024)).passes(maps.ReasonPassFragment)
	})
}

// The fragments of two clients are not mixed up, even if their datagrams have the same id.
func TestFragmentsOfTwoClients(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{tapPod}})
		w.serve(t, service{at: []string{otherIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		one, two := udp(client, clusterIP).long(3000), udp(stranger, otherIP).long(3000)
		for i := range pieces(one) {
			why := maps.ReasonFlow
			if i == 0 {
				why = maps.ReasonTranslated
			}
			w.ingress(t, p, pieces(one)[i]).becomes(pieces(one.to(tapPod))[i], why)
			w.ingress(t, p, pieces(two)[i]).becomes(pieces(two.to(portPod))[i], why)
		}
	})
}

// A sender reuses the id of a datagram. The ports of the first datagram are not used for fragments of the
// second one, and fragments that arrive before the first one of their datagram pass untranslated: they wait
// for it where datagrams are reassembled.
func TestFragmentsOfAnotherDatagram(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		const more = "8.0.96.1:81"
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{tapPod}})
		w.serve(t, service{at: []string{more}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		one, other := udp(p.client, clusterIP).long(3000), udp(p.client, more).long(3000)
		goes := func(i int, in packet, to string, why maps.Reason) {
			t.Helper()
			w.ingress(t, p, pieces(in)[i]).becomes(pieces(in.to(to))[i], why)
		}
		goes(0, one, tapPod, maps.ReasonTranslated)
		goes(2, one, tapPod, maps.ReasonFlow)
		goes(1, one, tapPod, maps.ReasonFlow)

		w.ingress(t, p, pieces(other)[1]).passes(maps.ReasonPassFragment)
		goes(0, other, portPod, maps.ReasonTranslated)
		goes(1, other, portPod, maps.ReasonFlow)

		goes(0, one, tapPod, maps.ReasonFlow) // and the end of the other one was lost
		goes(1, one, tapPod, maps.ReasonFlow)
		w.wait(t, 29*time.Second)
		goes(2, one, tapPod, maps.ReasonFlow)

		out := udp(tapPod, p.client).long(3000)
		for i, part := range pieces(out) {
			w.egress(t, p, part).becomes(pieces(out.from(clusterIP))[i], maps.ReasonFlow)
		}
		w.egress(t, p, pieces(out)[1]).passes(maps.ReasonPassFragment)
	})
}

// Fragments are forgotten after half a minute.
func TestFragmentsAge(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{tapPod}})
		in := udp(p.client, clusterIP).long(3000)
		w.ingress(t, p, pieces(in)[0]).becomes(pieces(in.to(tapPod))[0], maps.ReasonTranslated)
		w.wait(t, 31*time.Second)
		w.ingress(t, p, pieces(in)[1]).passes(maps.ReasonPassFragment)
	})
}

// A later fragment neither opens nor answers a flow.
func TestFragmentsOfNoFlow(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP})
		in := udp(client, clusterIP).long(3000)
		w.refused(t, p, pieces(in)[0]).ends(verdictRedirect, maps.ReasonRejectNoBackend)
		w.ingress(t, p, pieces(in)[1]).drops(maps.ReasonDropNoFlow)
		w.holds(t, 0, false)
		w.ingress(t, p, pieces(ping(client, clusterIP).long(3000))[1]).passes(maps.ReasonPassFragment)
	})
}

// IPv6 has fragment headers on datagrams in one piece, too.
func TestFragmentThatIsAll(t *testing.T) {
	for _, proto := range transports {
		t.Run(proto.String(), func(t *testing.T) {
			w := newWorld(t, ipv6)
			w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
			in := first(proto, client, clusterIP).rest(0)
			w.ingress(t, uplink, in).becomes(in.to(portPod), maps.ReasonTranslated)
			out := answer(proto, portPod, client).rest(0)
			w.egress(t, uplink, out).becomes(out.from(clusterIP), maps.ReasonFlow)
		})
	}
}

// The checksum of SCTP cannot be updated from one fragment. SCTP is only fragmented if the MTU of the path
// is smaller than SCTP knows.
func TestFragmentsOfSCTP(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolSCTP, to: []string{"8.0.4.2:80"}})
		w.serve(t, service{at: []string{otherIP}, proto: layers.IPProtocolSCTP, to: []string{tapPod}})
		for vip, backend := range map[string]string{clusterIP: "8.0.4.2:80", otherIP: tapPod} {
			in := sctp(client, vip, chunkInit)
			w.ingress(t, p, in).becomes(in.to(backend), maps.ReasonTranslated)
		}
		same := sctp(client, clusterIP, chunkData).long(200)
		w.ingress(t, p, same.fragment(0, 104)).becomes(same.to("8.0.4.2:80").fragment(0, 104), maps.ReasonFlow)
		w.ingress(t, p, same.rest(104)).becomes(same.to("8.0.4.2:80").rest(104), maps.ReasonFlow)
		w.refused(t, p, sctp(client, otherIP, chunkData).long(200).fragment(0, 104)).drops(maps.ReasonDropRewrite)
	})
}
