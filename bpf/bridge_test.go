package bpf

import (
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// Only packets between two pods of one bridge go to the backend's own Ethernet address, because only their
// answers would bypass the node.
func TestShortcut(t *testing.T) {
	port := podPort
	for _, test := range []struct {
		name    string
		at      place
		client  string
		backend string
		direct  bool
	}{
		{"between pods of the bridge", port, "8.0.1.9:40000", portPod, true},
		{"not to a backend elsewhere", port, "8.0.1.9:40000", tapPod, false},
		{"not to a backend on another node", port, "8.0.1.9:40000", remotePod, false},
		{"not to a backend that has no known neighbour", port, "8.0.1.9:40000", "8.0.1.99:8080", false},
		{"not to the node", port, "8.0.1.9:40000", hostPod, false},
		{"not from a client that is answered by another way", port, client, portPod, false},
		{"not from a pod that has no bridge", podVeth, "8.0.1.9:40000", portPod, false},
		{"not from an uplink that is a port of the bridge", bridgedNIC, "8.0.1.9:40000", portPod, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{test.at}, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, to: []string{test.backend}})
				for _, flags := range []string{"S", "."} {
					in := tcp(test.client, clusterIP, flags)
					o := w.ingress(t, p, in)
					o.verdictIs(verdictNext)
					want := o.between
					in = in.fromPort(maps.Port(w.flowOf(t, test.client, clusterIP).StackPort))
					if test.direct {
						want.dst = macOf(at(test.backend).Addr())
					}
					o.compare(in.to(test.backend).frame(w.family, want))
				}
			})
		})
	}
}

// Two pods of a bridge with the node in between: both ways pass the same hooks.
func TestMasqueradeBehindABridge(t *testing.T) {
	each(t, []place{podPort}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPodToo}, flags: maps.PoolMasquerade})
		in := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, in).becomes(in.to(portPodToo), maps.ReasonTranslated)
		port := maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort)
		for range 2 {
			w.egress(t, podPortToo, in.to(portPodToo)).becomes(in.to(portPodToo).from(bridge).fromPort(port), maps.ReasonFlow)
			back := tcp(portPodToo, bridge, "S.").toPort(port)
			o := w.ingress(t, podPortToo, back)
			o.ends(verdictNext, maps.ReasonFlow) // directly to the client, if that is known
			w.egress(t, p, back.to(p.client)).becomes(back.to(p.client).from(clusterIP), maps.ReasonFlow)
			in = tcp(p.client, clusterIP, ".")
			w.ingress(t, p, in).becomes(in.to(portPodToo), maps.ReasonFlow)
		}
	})
}

// A tagged frame between two pods of a bridge keeps its tag.
func TestShortcutOfATaggedFrame(t *testing.T) {
	each(t, []place{podPort}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		in := udp(p.client, clusterIP).tagged(8)
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
	})
}
