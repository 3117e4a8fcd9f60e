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

// A packet with the tuple of a client that arrives on a device of another class is not the client's: it does
// not get the client's backend, and changes nothing of the flow.
func TestPacketOfAClientByAnotherClassOfDevices(t *testing.T) {
	for _, proto := range transports {
		for _, established := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, established: %v", proto, established), func(t *testing.T) {
				each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
					c := begin(t, w, p, proto, portPod)
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
					about := e.about(portUnreachable, p.client, clusterIP, answer(proto, clusterIP, p.client))
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
					w.ingress(t, p, about).becomes(e.about(portUnreachable, p.client, portPod, answer(proto, portPod, p.client)), maps.ReasonFlowError)
				})
			})
		}
	}
}

// sorted returns all entries, in a fixed order.
func (w *world) sorted(t *testing.T) []entry {
	t.Helper()

	return slices.SortedFunc(slices.Values(w.entries(t)), func(a, b entry) int { return cmp.Compare(a.flow.Role, b.flow.Role) })
}

// A device gets another class, as an uplink does that becomes the port of a bridge: open flows of the clients behind it
// go on, and are bound to the new class. So are errors about them translated.
func TestDeviceGetsAnotherClass(t *testing.T) {
	for _, proto := range transports {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, proto, portPod)
				c.establish(t)
				was, is := uint8(maps.FlowByUplinks), uint8(maps.FlowByPods)
				if p.class == maps.DevicePods {
					was, is = is, was
				}
				p.class = maps.DevicePods + maps.DeviceUplink - p.class
				e := errorWorld{c, unchanged, 8}
				about := e.about(portUnreachable, p.client, clusterIP, answer(proto, clusterIP, p.client))
				w.ingress(t, p, about).becomes(e.about(portUnreachable, p.client, portPod, answer(proto, portPod, p.client)), maps.ReasonFlowError)
				w.ingress(t, p, second(proto, p.client, clusterIP)).becomes(second(proto, p.client, portPod), maps.ReasonFlow)
				for _, e := range w.entries(t) {
					if e.flow.Role == maps.FlowFromClient && e.flow.Flags&(was|is) != is {
						t.Errorf("flags are %#x, want the class %#x", e.flow.Flags, is)
					}
				}
			})
		})
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
