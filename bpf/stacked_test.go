package bpf

import (
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// stack is two attached devices of which one is above the other: what passes one passes both.
type stack struct {
	w            *world
	below, above place
}

// enters sends a packet from outside, which one of the devices translates.
func (s stack) enters(t *testing.T, in, want packet, why maps.Reason) {
	t.Helper()
	s.w.ingress(t, s.below, in).becomes(want, why)
	s.once(t, func() outcome { return s.w.ingress(t, s.above, want) })
}

// leaves sends a packet of the node's stack.
func (s stack) leaves(t *testing.T, in, want packet) {
	t.Helper()
	s.w.egress(t, s.above, in).becomes(want, maps.ReasonFlow)
	s.once(t, func() outcome { return s.w.egress(t, s.below, want) })
}

// once checks that the second of the devices changes neither the packet nor any flow.
func (s stack) once(t *testing.T, pass func() outcome) {
	t.Helper()
	before := s.w.entries(t)
	o := pass()
	o.verdictIs(verdictNext)
	o.isUntouched()
	if after := s.w.entries(t); len(after) != len(before) {
		t.Errorf("the other device made %d entries of %d", len(after), len(before))
	}
}

// A packet that passes two devices which are attached, as the port of a bridge and a VLAN of that, or a device and an
// ipvlan above it, is translated by one of them.
func TestTranslatedOnce(t *testing.T) {
	for _, below := range []place{uplink, bridgedNIC} {
		for _, backend := range []string{tapPod, remotePod} {
			for _, proto := range transports {
				t.Run(fmt.Sprintf("%s to %s", proto, backend), func(t *testing.T) {
					each(t, []place{below}, func(t *testing.T, w *world, p place) {
						s := stack{w, below, uplink}
						w.isAbove(t, uplink.device)
						w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{backend}})
						says := func(in packet, why maps.Reason) {
							t.Helper()
							s.enters(t, in, in.to(backend), why)
							if port := w.flowOf(t, client, clusterIP).MasqueradePort; port != 0 {
								s.leaves(t, in.to(backend), in.to(backend).from(node).fromPort(maps.Port(port)))
							}
						}
						hears := func(in packet) {
							t.Helper()
							if port := w.flowOf(t, client, clusterIP).MasqueradePort; port != 0 {
								s.enters(t, in.to(node).toPort(maps.Port(port)), in, maps.ReasonFlow)
							}
							s.leaves(t, in, in.from(clusterIP))
						}
						says(first(proto, client, clusterIP), maps.ReasonTranslated)
						says(first(proto, client, clusterIP), maps.ReasonFlow)
						hears(answer(proto, backend, client))
						says(second(proto, client, clusterIP), maps.ReasonFlow)
						hears(third(proto, backend, client))
						for range 2 {
							says(second(proto, client, clusterIP).with("more"), maps.ReasonFlow)
							hears(third(proto, backend, client).with("more"))
						}
						if proto == layers.IPProtocolTCP {
							says(tcp(client, clusterIP, "F."), maps.ReasonFlow)
							hears(tcp(backend, client, "F.").acks(2))
						}
					})
				})
			}
		}
	}
}
