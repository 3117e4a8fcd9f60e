package bpf

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	diff "github.com/google/go-cmp/cmp"
	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

// classRows are backends, and where their clients are that begin flows to them.
var classRows = []struct {
	name, backend string
	places        []place
}{
	{"a backend here", portPod, []place{uplink, podVeth}},
	{"one on another node", remotePod, ways},
}

// A packet with the tuple of a client that arrives on a device of another class is not the client's: it does
// not get the client's backend, and changes nothing of the flow.
func TestPacketOfAClientByAnotherClassOfDevices(t *testing.T) {
	for _, row := range classRows {
		for _, proto := range transports {
			for _, established := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s of %s, established: %v", proto, row.name, established), func(t *testing.T) {
					each(t, row.places, func(t *testing.T, w *world, p place) {
						c := begin(t, w, p, proto, row.backend)
						if established {
							c.establish(t)
						}
						other := podVeth
						if p.class == maps.DevicePods {
							other = uplink
						}
						had := w.sorted(t)
						w.ingress(t, other, first(proto, p.client, clusterIP)).drops(maps.ReasonDropTupleTaken)
						e := errorWorld{c, unchanged, 8}
						sent := answer(proto, clusterIP, p.client)
						about := e.about(portUnreachable, p.client, clusterIP, sent)
						w.ingress(t, other, about).drops(maps.ReasonDropNoFlow)
						if proto != layers.IPProtocolUDP {
							w.refused(t, other, second(proto, p.client, clusterIP)).ends(verdictRedirect, maps.ReasonRejectNoFlow)
							w.ingress(t, other, ofTransport(proto, p.client, clusterIP, "R", chunkAbort, "")).drops(maps.ReasonDropNoFlow)
						}
						if changed := diff.Diff(had, w.sorted(t), diff.AllowUnexported(entry{})); changed != "" {
							t.Errorf("the flow was changed (-before +after):\n%s", changed)
						}
						c.first(t, maps.ReasonFlow)
						c.hears(t, answer(proto, portPod, p.client))
						translated := w.ingress(t, p, about)
						if c.isTurned() {
							translated.leaves(e.about(portUnreachable, node, row.backend, sent.from(row.backend).to(node).toPort(c.masqueradedPort)), maps.ReasonFlowError)
						} else {
							translated.becomes(e.about(portUnreachable, p.client, row.backend, sent.from(row.backend)), maps.ReasonFlowError)
						}
					})
				})
			}
		}
	}
}

// sorted returns all entries, in a fixed order.
func (w *world) sorted(t *testing.T) []entry {
	t.Helper()

	return slices.SortedFunc(slices.Values(w.entries(t)), func(a, b entry) int { return cmp.Compare(a.flow.Role, b.flow.Role) })
}

// A device gets another class, as an uplink does that becomes the port of a bridge, and its former one again: open flows
// of the clients behind it go on, and are bound to the class that it has. So are errors about them translated. A flow
// that was turned around passes the stack from the first packet at another class on.
func TestDeviceGetsAnotherClass(t *testing.T) {
	for _, row := range classRows {
		for _, proto := range transports {
			t.Run(fmt.Sprintf("%s of %s", proto, row.name), func(t *testing.T) {
				each(t, row.places, func(t *testing.T, w *world, p place) {
					c := begin(t, w, p, proto, row.backend)
					c.establish(t)
					e := errorWorld{c, unchanged, 8}
					sent := answer(proto, clusterIP, p.client)
					for _, class := range []uint32{maps.DevicePods + maps.DeviceUplink - p.class, p.class} {
						c.place.class = class
						if c.isTurned() {
							w.turns = false
							c.says(t, second(proto, client, client))
						}
						w.ingress(t, c.place, e.about(portUnreachable, p.client, clusterIP, sent)).
							becomes(e.about(portUnreachable, p.client, row.backend, sent.from(row.backend)), maps.ReasonFlowError)
						c.says(t, second(proto, client, client))
						if c.masqueradedPort != 0 {
							c.leaves(t, second(proto, client, client))
							c.returns(t, third(proto, client, client))
						}
						c.hears(t, third(proto, client, client))
						by := map[uint32]uint8{maps.DevicePods: maps.FlowByPods, maps.DeviceUplink: maps.FlowByUplinks}[class]
						for _, e := range w.entries(t) {
							if e.flow.Role == maps.FlowFromClient && e.flow.Flags&(maps.FlowByPods|maps.FlowByUplinks) != by {
								t.Errorf("flags are %#x, want the class %#x", e.flow.Flags, by)
							}
						}
					}
				})
			})
		}
	}
}

// A flow of an earlier build does not contain the class of devices of its client.
func TestFlowWithoutAClass(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.establish(t)
		for _, e := range w.entries(t) {
			e.flow.Flags &^= maps.FlowByPods | maps.FlowByUplinks
			w.put(t, e)
		}
		c.says(t, tcp(client, client, "P.").with("go on"))
	})
}
