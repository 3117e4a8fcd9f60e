package bpf

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// remember gives a client affinity to a backend.
func (w *world) remember(t testing.TB, s published, client, backend string, when uint64) {
	t.Helper()
	key := maps.AffinityKey{Client: w.mapAddr(client).Bytes, ServicePortId: s.id, ClientKind: maps.ClientAddr}
	lab.Must(t, w.maps.Affinity.Put(key, maps.Affinity{LastUsed: when, BackendId: s.backends[backend]}))
}

// The backends that a client may get depend on its place.
func TestScopeOfTheDevice(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, outside: []string{portPodToo}})
		want := map[uint32]string{maps.DevicePods: tapPod, maps.DeviceUplink: portPodToo}[p.class]
		in := tcp(p.client, balancer, "S")
		w.ingress(t, p, in).becomes(in.to(want), maps.ReasonTranslated)
	})
}

// With detectLocalMode, a client on a device of pods may be external. A client on an uplink or a tunnel is
// never a pod of this node.
func TestScopeOfTheSource(t *testing.T) {
	bySource := func(c *DeviceConfig) { c.ScopeBySource = true }
	each(t, []place{uplink, tunnel, podVeth}, func(t *testing.T, w *world, p place) {
		lab.Must(t, w.maps.LocalCIDRs.Put(maps.CIDRKeyOf(w.family.prefix("8.0.4.0/24")), 1))
		w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, outside: []string{portPodToo}})
		ofPod := map[uint32]string{maps.DevicePods: tapPod, maps.DeviceUplink: portPodToo}[p.class]
		in := tcp("8.0.4.9:40000", balancer, "S")
		w.goesTo(t, p, in, ofPod)
		in = tcp("8.0.5.9:40000", balancer, "S")
		w.goesTo(t, p, in, portPodToo)
	}, bySource)
}

// goesTo checks that a first packet goes on to a backend, perhaps from another port.
func (w *world) goesTo(t *testing.T, p place, in packet, backend string) {
	t.Helper()
	o := w.ingress(t, p, in)
	seen := maps.Port(w.flowOf(t, in.src.String(), in.dst.String()).StackPort)
	o.becomes(in.fromPort(seen).to(backend), maps.ReasonTranslated)
}

// Traffic policy Local, and no backend here.
func TestNoLocalBackend(t *testing.T) {
	each(t, []place{uplink, tunnel, podVeth}, func(t *testing.T, w *world, p place) {
		for _, proto := range transports {
			w.serve(t, service{at: []string{balancer}, proto: proto, kind: maps.KindLoadBalancer, to: []string{tapPod}, outside: []string{}, flags: maps.PoolDropIfEmpty})
			in := first(proto, p.client, balancer)
			if p.class == maps.DevicePods {
				w.ingress(t, p, in).becomes(in.to(tapPod), maps.ReasonTranslated)
			} else {
				w.ingress(t, p, in).drops(maps.ReasonDropNoLocalBackend)
			}
		}
	})
}

// The Service leaves clients outside to the routes, as it has no backend here. Its source ranges hold, and inside nothing is other.
func TestPassesThrough(t *testing.T) {
	each(t, []place{uplink, tunnel, podVeth}, func(t *testing.T, w *world, p place) {
		for _, proto := range transports {
			w.serve(t, service{
				at: []string{balancer}, proto: proto, kind: maps.KindLoadBalancer, to: []string{tapPod}, outside: []string{},
				flags: maps.PoolPassIfEmpty, ranges: []string{at(p.client).Addr().String() + "/32"},
			})
			in := first(proto, p.client, balancer)
			if p.class == maps.DevicePods {
				w.ingress(t, p, in).becomes(in.to(tapPod), maps.ReasonTranslated)

				continue
			}
			w.ingress(t, p, in).passes(maps.ReasonPassNoFrontend)
			w.ingress(t, p, first(proto, "8.0.99.1:999", balancer)).drops(maps.ReasonDropSourceRange)
			if proto == layers.IPProtocolTCP { // of a connection that the routes have led elsewhere
				w.ingress(t, p, tcp(p.client, balancer, "A")).passes(maps.ReasonPassNoFlow)
			}
		}
	})
}

// Node ports answer only on the selected addresses of the node.
func TestNodePorts(t *testing.T) {
	for _, proto := range transports {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{nodePort}, proto: proto, kind: maps.KindNodePort, to: []string{tapPod}})
				w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolTCP, to: []string{tapPod}})
				const from = "8.0.100.7:999"
				for i, vip := range []string{node, nodeOther, nodePrefers} {
					in := first(proto, from, vip).toPort(30080).fromPort(uint16(1000 + i))
					w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
					f := w.flowOf(t, in.src.String(), in.dst.String())
					if f.BackendAddrPort() != w.family.addrPort(at(tapPod)) {
						t.Errorf("%s: the backend is %s", vip, f.BackendAddrPort())
					}
				}
				w.ingress(t, p, first(proto, from, bridge).toPort(30080)).passes(maps.ReasonPassNoFrontend)
				w.ingress(t, p, first(proto, from, node).toPort(30081)).passes(maps.ReasonPassNoFrontend)
				w.ingress(t, p, first(proto, from, otherServer).toPort(30080)).passes(maps.ReasonPassOtherTraffic)
				if proto == layers.IPProtocolTCP {
					w.refused(t, uplink, first(proto, from, clusterIP).toPort(30080)).ends(verdictRedirect, maps.ReasonRejectNoPort)
				}
			})
		})
	}
}

// An address of both the node and a Service: the port of the Service takes precedence over the node port, and
// the other ports are the node's.
func TestServiceAtANodeAddress(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		vip := at(node).Addr().String() + ":30080"
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{tapPod}})
		w.serve(t, service{at: []string{vip}, kind: maps.KindExternalIP, to: []string{portPodToo}})
		in := tcp(p.client, vip, "S")
		w.ingress(t, p, in).becomes(in.to(portPodToo), maps.ReasonTranslated)
		w.ingress(t, p, in.toPort(22)).passes(maps.ReasonPassNoFrontend)
		w.ingress(t, p, ping(p.client, node)).passes(maps.ReasonPassNoFrontend)
	})
}

// Other ports of a load balancer's address pass, and are not refused.
func TestOtherPortOfAnExternalAddress(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}})
		w.ingress(t, p, tcp(p.client, balancer, "S").toPort(81)).passes(maps.ReasonPassNoFrontend)
		w.ingress(t, p, udp(p.client, balancer)).passes(maps.ReasonPassNoFrontend)
		w.ingress(t, p, ping(p.client, balancer)).passes(maps.ReasonPassNoFrontend)
	})
}

// loadBalancerSourceRanges are checked first, even before the existence of a backend.
func TestSourceRanges(t *testing.T) {
	const allowed, other = "8.0.20.5:40000", "8.0.21.5:40000"
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{balancer}, kind: maps.KindLoadBalancer, to: []string{tapPod}, ranges: []string{"8.0.20.0/24", "8.0.22.1/32"}})
		w.serve(t, service{at: []string{"8.0.30.2:80"}, kind: maps.KindLoadBalancer, ranges: []string{"8.0.20.0/24"}})
		w.serve(t, service{at: []string{"8.0.30.3:80"}, kind: maps.KindLoadBalancer, to: []string{tapPod}, ranges: []string{"8.0.21.0/24"}})
		for _, src := range []string{allowed, "8.0.22.1:40000"} {
			w.goesTo(t, p, tcp(src, balancer, "S"), tapPod)
		}
		for _, src := range []string{other, "8.0.22.2:40000"} {
			w.ingress(t, p, tcp(src, balancer, "S")).drops(maps.ReasonDropSourceRange)
			w.ingress(t, p, tcp(src, "8.0.30.2:80", "S")).drops(maps.ReasonDropSourceRange)
		}
		w.refused(t, uplink, tcp(allowed, "8.0.30.2:80", "S")).ends(verdictRedirect, maps.ReasonRejectNoBackend)
		w.ingress(t, p, tcp(allowed, "8.0.30.3:80", "S")).drops(maps.ReasonDropSourceRange)
	})
}

// A change of source ranges affects new flows only.
func TestSourceRangesLeaveFlowsAlone(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		c := begin(t, w, p, layers.IPProtocolTCP, portPod)
		c.establish(t)
		w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}, ranges: []string{"8.0.20.0/24"}})
		c.says(t, tcp(client, client, "P.").with("still here"))
		w.ingress(t, p, tcp(stranger, clusterIP, "S")).drops(maps.ReasonDropSourceRange)
	})
}

// A client keeps its backend with any source port, as long as it returns in time and the backend exists.
func TestAffinity(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		backends := many(16)
		s := w.serve(t, service{at: []string{clusterIP, "8.0.30.9:443"}, to: backends, affinity: 100})
		choose := func(port uint16, vip string) string {
			in := tcp(p.client, vip, "S").fromPort(port)
			w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)

			return w.backendOf(t, w.flowOf(t, in.src.String(), vip), backends...)
		}
		had := choose(1000, clusterIP)
		for port := range uint16(10) {
			if got := choose(2000+port, clusterIP); got != had {
				t.Errorf("backend is %s, it was %s", got, had)
			}
		}
		if got := choose(3000, "8.0.30.9:443"); got != had {
			t.Errorf("at another address, the backend is %s, it was %s", got, had)
		}

		// Each new flow restarts the timeout.
		w.remember(t, s, p.client, backends[3], now(t)-99e9)
		if got := choose(4000, clusterIP); got != backends[3] {
			t.Errorf("after 99 s the backend is %s, want %s", got, backends[3])
		}
		if used := w.remembered(t, s, p.client).LastUsed; now(t)-used < 50e9 {
			t.Errorf("last used %d ns ago, by a packet that anyone can send", now(t)-used)
		}
		c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: backends[3]}
		c.place.client = at(p.client).Addr().String() + ":4000"
		c.establish(t)
		if used := w.remembered(t, s, p.client).LastUsed; now(t)-used > 50e9 {
			t.Errorf("last used %d ns ago", now(t)-used)
		}
	})
}

// A client keeps its backend for good once its flow is confirmed. Before that it keeps its backend as well,
// but in a table where it evicts no confirmed client.
func TestAffinityOfUnconfirmedClients(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				backends := many(16)
				s := w.serve(t, service{at: []string{clusterIP}, proto: proto, to: backends, affinity: 100})
				key := maps.AffinityKey{Client: w.mapAddr(p.client).Bytes, ServicePortId: s.id, ClientKind: maps.ClientAddr}
				mustBeIn := func(table, not *maps.Map[maps.AffinityKey, maps.Affinity]) {
					t.Helper()
					_, in, err := table.Lookup(key)
					_, also, failed := not.Lookup(key)
					lab.Must(t, err, failed)
					if !in || also {
						t.Errorf("the client is in %s: %v, and in %s: %v", table.Name(), in, not.Name(), also)
					}
				}
				in := first(proto, p.client, clusterIP)
				w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
				mustBeIn(w.maps.Claims, w.maps.Affinity)
				c := &conversation{w: w, place: p, proto: proto, vip: clusterIP}
				c.backend = w.backendOf(t, w.flowOf(t, p.client, clusterIP), backends...)
				for i := range uint16(6) {
					again := in.fromPort(2000 + i)
					w.ingress(t, p, again).becomes(again.to(c.backend), maps.ReasonTranslated)
				}
				mustBeIn(w.maps.Claims, w.maps.Affinity)
				c.establish(t)
				mustBeIn(w.maps.Affinity, w.maps.Claims)
				again := in.fromPort(3000)
				w.ingress(t, p, again).becomes(again.to(c.backend), maps.ReasonTranslated)
				mustBeIn(w.maps.Affinity, w.maps.Claims)
			})
		})
	}
}

func (w *world) remembered(t testing.TB, s published, client string) maps.Affinity {
	t.Helper()
	key := maps.AffinityKey{Client: w.mapAddr(client).Bytes, ServicePortId: s.id, ClientKind: maps.ClientAddr}
	value, ok, err := w.maps.Affinity.Lookup(key)
	lab.Must(t, err)
	if !ok {
		t.Fatalf("%s is not remembered", client)
	}

	return value
}

// After the timeout a client gets any backend: of 8 clients, all of which had one of 41, some get another.
func TestAffinityTimeout(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		backends := append(many(40), portPod)
		s := w.serve(t, service{at: []string{clusterIP}, to: backends, affinity: 100})
		kept := map[uint64]int{}
		for i, seconds := range []uint64{99, 101, 99, 101, 99, 101, 99, 101} {
			from := fmt.Sprintf("8.0.70.%d:4000", i+1)
			w.remember(t, s, from, portPod, now(t)-seconds*1e9)
			w.ingress(t, p, tcp(from, clusterIP, "S")).ends(verdictNext, maps.ReasonTranslated)
			if w.backendOf(t, w.flowOf(t, from, clusterIP), backends...) == portPod {
				kept[seconds]++
			}
		}
		if kept[99] != 4 || kept[101] == 4 {
			t.Errorf("of 4 clients, %d keep their backend after 99 s, and %d after 101 s", kept[99], kept[101])
		}
	})
}

// A Service with more clients than the map has room for evicts those of other Services that stay away, but no
// client that comes back while an eighth of the map is used again.
func TestAffinityBesideABusyService(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: append(many(16), portPod), affinity: 100})
		w.remember(t, s, client, portPod, now(t))
		capacity := w.maps.Affinity.Capacity()
		for i := range 3 * capacity {
			busy := maps.AffinityKey{ServicePortId: s.id + 1, ClientKind: maps.ClientAddr}
			binary.BigEndian.PutUint32(busy.Client[12:], uint32(i))
			lab.Must(t, w.maps.Affinity.Put(busy, maps.Affinity{LastUsed: now(t), BackendId: 1}))
			if i%(capacity/8) == 0 {
				in := tcp(client, clusterIP, "S").fromPort(uint16(1000 + i/8))
				w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)
			}
		}
	})
}

// Affinity ends with the timeout, the backend, or its slot.
func TestAffinityEnds(t *testing.T) {
	for _, test := range []struct {
		name string
		end  func(t *testing.T, w *world, s published)
	}{
		{"after the timeout", func(t *testing.T, w *world, s published) { w.remember(t, s, client, portPod, now(t)-101e9) }},
		{"with the backend", func(t *testing.T, w *world, s published) { w.removeBackend(t, s, portPod) }},
		{"with the slot", func(t *testing.T, w *world, s published) {
			w.replace(t, clusterIP, layers.IPProtocolTCP, maps.Pool{ServicePortId: s.id, AffinitySeconds: 100}, w.putBackend(t, s.id, tapPod, true))
		}},
		{"not of another client", func(t *testing.T, w *world, s published) { w.remember(t, s, stranger, portPod, now(t)) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				backends := append(many(40), portPod)
				s := w.serve(t, service{at: []string{clusterIP}, to: backends, affinity: 100})
				if test.name != "not of another client" {
					w.remember(t, s, client, portPod, now(t))
				}
				test.end(t, w, s)
				in := tcp(client, clusterIP, "S")
				w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
				w.egress(t, p, tcp(w.backendOf(t, w.flowOf(t, client, clusterIP), append(backends, tapPod)...), client, "S."))
				w.ingress(t, p, tcp(client, clusterIP, "."))
				chosen := w.flowOf(t, client, clusterIP).BackendAddrPort()
				id := w.remembered(t, s, client).BackendId
				backend := w.maps.Backends.Get(maps.Index(id))
				if backend.Id != id || backend.AddrPort() != chosen {
					t.Errorf("backend %s was chosen, %s is remembered", chosen, backend.AddrPort())
				}
				if chosen == w.family.addrPort(at(portPod)) && test.name != "not of another client" {
					// One time in 41, after the timeout. Not where it is gone.
					if test.name != "after the timeout" {
						t.Errorf("the old backend was chosen")
					}
				}
			})
		})
	}
}

// All slots that are tried contain ids of backends that do not exist.
func TestBackendMissing(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		w.removeBackend(t, s, portPod)
		w.ingress(t, p, tcp(p.client, clusterIP, "S")).drops(maps.ReasonDropBackendMissing)
	})
}
