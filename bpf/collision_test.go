package bpf

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
)

const otherIP = "8.0.96.2:80"

// Two Services share a backend, and a client uses one port for both: answers have to come from the right
// Service.

// As long as there are other backends, another one is chosen.
func TestSharedBackendIsAvoided(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
				w.serve(t, service{at: []string{otherIP}, proto: proto, to: []string{portPod, portPodToo}})
				changed := 0
				for i := range 30 {
					from := netip.AddrPortFrom(at(p.client).Addr(), uint16(41000+i)).String()
					in := first(proto, from, clusterIP)
					w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
					w.ingress(t, p, in.to(otherIP)).ends(verdictNext, maps.ReasonTranslated)
					f := w.flowOf(t, from, otherIP)
					// Three times in four the first three tries find the other one.
					if f.StackPort != f.ClientPort {
						changed++
					} else if w.backendOf(t, f, portPod, portPodToo) != portPodToo {
						t.Fatal("both flows have one reply tuple")
					}
				}
				if changed > 15 {
					t.Errorf("%d of 30 flows had to change their port", changed)
				}
			})
		})
	}
}

// If there is no other, the stack and the backend see another port of the client.
func TestSharedBackendSeesAnotherPort(t *testing.T) {
	for _, proto := range transports {
		for _, masqueraded := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, masqueraded: %v", proto, masqueraded), func(t *testing.T) {
				each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
					backend := portPod
					if masqueraded {
						backend = remotePod
					}
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{backend}})
					w.serve(t, service{at: []string{otherIP}, proto: proto, to: []string{backend}})
					one := &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: backend}
					one.first(t, maps.ReasonTranslated)
					one.masqueradedPort = maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort)
					one.establish(t)

					in := first(proto, p.client, otherIP)
					var o outcome
					counts := w.counted(t, func() { o = w.ingress(t, p, in) })
					f := w.flowOf(t, p.client, otherIP)
					seen := maps.Port(f.StackPort)
					o.becomes(in.to(backend).fromPort(seen), maps.ReasonTranslated)
					if counts.StackPorts != 1 || seen == 40000 || seen < DefaultMasqueradePorts.Low || seen > DefaultMasqueradePorts.High {
						t.Errorf("port is %d, %d were changed", seen, counts.StackPorts)
					}
					speakBoth(t, one, in, f)
				})
			})
		}
	}
}

// speakBoth sends packets of both flows of a client's port alternately.
func speakBoth(t *testing.T, one *conversation, in packet, other maps.Flow) {
	t.Helper()
	w, p, proto, backend := one.w, one.place, one.proto, one.backend
	seen, lent := maps.Port(other.StackPort), maps.Port(other.MasqueradePort)
	for range 2 {
		if other.IsMasqueraded() {
			left := in.to(backend).fromPort(seen)
			w.egress(t, p, left).becomes(left.from(node).fromPort(lent), maps.ReasonFlow)
			back := answer(proto, backend, node).toPort(lent)
			w.ingress(t, p, back).becomes(back.to(p.client).toPort(seen), maps.ReasonFlow)
		}
		reply := answer(proto, backend, p.client).toPort(seen)
		w.egress(t, p, reply).becomes(reply.from(otherIP).to(p.client), maps.ReasonFlow)
		in = second(proto, p.client, otherIP)
		w.ingress(t, p, in).becomes(in.to(backend).fromPort(seen), maps.ReasonFlow)

		one.says(t, second(proto, p.client, clusterIP))
		one.hears(t, answer(proto, backend, p.client))
	}
}

// A client with affinity keeps its backend, so its port is changed.
func TestSharedBackendWithAffinity(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		s := w.serve(t, service{at: []string{otherIP}, to: []string{portPod, portPodToo}, affinity: 100})
		w.remember(t, s, p.client, portPod, now(t))
		in := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
		o := w.ingress(t, p, in.to(otherIP))
		o.becomes(in.to(portPod).fromPort(maps.Port(w.flowOf(t, p.client, otherIP).StackPort)), maps.ReasonTranslated)
	})
}

// A reply tuple whose flow has ended is free.
func TestReplyTupleOfAnEndedFlow(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.establish(t)
		c.hears(t, tcp(client, client, "R."))
		w.wait(t, 11*time.Second)
		w.serve(t, service{at: []string{otherIP}, to: []string{portPod}})
		in := tcp(p.client, otherIP, "S")
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
		reply := tcp(portPod, p.client, "S.")
		w.egress(t, p, reply).becomes(reply.from(otherIP), maps.ReasonFlow)
	})
}
