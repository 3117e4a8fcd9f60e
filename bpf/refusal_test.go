package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// nodeAt returns the address of this node that a client at a place sees.
func nodeAt(p place) string {
	return map[string]string{
		"eth0": node, "nic0": node, "tap0": "8.0.4.1:0", "tun0": "8.0.6.1:0", "port0": bridge,
	}[p.device]
}

// quotedAtMost is the number of bytes of a packet that an error quotes.
const quotedAtMost = 128

// refusalOf returns the ICMP error that answers a packet.
func refusalOf(in packet, from string) packet {
	about := in
	about.tags, about.padding = nil, 0
	refusal := icmpError(portUnreachable, from, in.src.String(), about).quoting(quotedAtMost).withTOS(0xc0)
	refusal.own = true

	return refusal
}

// A refused client gets an error that quotes its packet.
func TestRefusals(t *testing.T) {
	const empty, live = "8.0.96.5:80", "8.0.96.6:80"
	type row struct {
		name string
		in   packet
		why  maps.Reason
	}
	var rows []row
	for _, proto := range transports {
		rows = append(rows,
			row{proto.String() + " to a Service without backends", first(proto, client, empty), maps.ReasonRejectNoBackend},
			row{proto.String() + " to a port that a live ClusterIP has not", first(proto, client, live).toPort(81), maps.ReasonRejectNoPort},
			row{proto.String() + ", long", first(proto, client, empty).long(200), maps.ReasonRejectNoBackend},
			row{proto.String() + " with options", first(proto, client, empty).withExtras(2), maps.ReasonRejectNoBackend},
			row{proto.String() + " in a frame that is filled up", first(proto, client, empty).with("ab").padded(30), maps.ReasonRejectNoBackend},
		)
	}
	rows = append(rows,
		row{"a ping of a ClusterIP", ping(client, live), maps.ReasonRejectNoPort},
		row{"another protocol to a ClusterIP", protocol(47, client, live), maps.ReasonRejectNoPort},
		row{"a datagram without a checksum", udp(client, empty).withoutSum(), maps.ReasonRejectNoBackend},
		row{"the first fragment", udp(client, empty).long(300).fragment(0, 256), maps.ReasonRejectNoBackend},
		row{"with few hops left", tcp(client, empty, "S").withHops(1), maps.ReasonRejectNoBackend},
	)
	for _, test := range rows {
		t.Run(test.name, func(t *testing.T) {
			each(t, ethernets, func(t *testing.T, w *world, p place) {
				for _, proto := range transports {
					w.serve(t, service{at: []string{empty}, proto: proto})
					w.serve(t, service{at: []string{live}, proto: proto, to: []string{portPod}})
				}
				in := test.in.from(p.client)
				w.refused(t, p, in).rejects(refusalOf(in, nodeAt(p)), test.why)
				w.holds(t, 0, false)
			})
		})
	}
}

// The error of a refused node port has the address of the node.
func TestRefusalOfANodePort(t *testing.T) {
	each(t, ethernets, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort})
		in := tcp(p.client, nodeOther, "S").toPort(30080)
		w.refused(t, p, in).rejects(refusalOf(in, nodeOther), maps.ReasonRejectNoBackend)
	})
}

// On an old kernel, too, the error comes from the node.
func TestRefusalOnAnOldKernel(t *testing.T) {
	each(t, []place{uplink, podPort}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}})
		in := tcp(p.client, clusterIP, "S")
		w.refused(t, p, in).rejects(refusalOf(in, nodeAt(p)), maps.ReasonRejectNoBackend)
	}, func(c *DeviceConfig) { c.FIBSource, c.ChecksumIPv6 = false, false })
}

// Packets from or to groups and unspecified addresses get no error.
func TestRefusalsThatAreSilent(t *testing.T) {
	const empty = "8.0.96.5:80"
	for _, test := range []struct {
		name   string
		places []place
		in     packet
		why    maps.Reason
	}{
		{"a group as source", ethernets, tcp("224.0.0.1:40000", empty, "S"), maps.ReasonDropSource},
		{"an unspecified source", ethernets, udp("0.0.0.0:40000", empty), maps.ReasonDropSource},
		{"a frame to all stations", []place{uplink, podVeth}, udp(client, empty).broadcast(), maps.ReasonRejectLimited},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, test.places, func(t *testing.T, w *world, p place) {
				for _, proto := range transports {
					w.serve(t, service{at: []string{empty}, proto: proto})
				}
				w.refused(t, p, test.in).drops(test.why)
			})
		})
	}
}

// A frame with a VLAN tag inside cannot be answered.
func TestRefusalOfATaggedFrame(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}})
		w.refused(t, p, tcp(p.client, clusterIP, "S").tagged(5)).drops(maps.ReasonDropRewrite)
	})
}

// There is no error about an error, which could go on forever.
func TestErrorsAreNotRefused(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}})
		for _, what := range []icmpKind{tooBig, portUnreachable, timeExceeded, badParameter} {
			in := icmpError(what, p.client, clusterIP, tcp(clusterIP, p.client, "S."))
			w.ingress(t, p, in).drops(maps.ReasonDropNoFlow)
		}
	})
}

// icmpBudget is the C type of that name.
type icmpBudget struct{ Full, _ uint64 }

// A client gets one error per second and a burst of six, as from the kernel.
func TestRefusalsAreLimited(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}})
		budgets := w.maps.Replacements()["sl_icmp_budgets"]
		refuse := func(client string, why maps.Reason) {
			t.Helper()
			in := tcp(client, clusterIP, "S")
			if why == maps.ReasonRejectLimited {
				w.refused(t, p, in).drops(why)
			} else {
				w.refused(t, p, in).rejects(refusalOf(in, node), why)
			}
		}
		for range 6 {
			refuse(stranger, maps.ReasonRejectNoBackend)
		}
		refuse(stranger, maps.ReasonRejectLimited)
		refuse(client, maps.ReasonRejectNoBackend) // another client

		rest := func(seconds int64) {
			t.Helper()
			key, budget := w.mapAddr(stranger), icmpBudget{}
			lab.Must(t, budgets.Lookup(&key, &budget))
			budget.Full -= uint64(seconds * 1e9)
			lab.Must(t, budgets.Put(&key, &budget))
		}
		rest(-1) // another CPU has a later clock
		refuse(stranger, maps.ReasonRejectLimited)
		rest(3)
		refuse(stranger, maps.ReasonRejectNoBackend)
		refuse(stranger, maps.ReasonRejectNoBackend)
		refuse(stranger, maps.ReasonRejectLimited)
		rest(1000)
		for range 6 {
			refuse(stranger, maps.ReasonRejectNoBackend)
		}
		refuse(stranger, maps.ReasonRejectLimited)
	})
}

// All clients together get only as many errors as the node may send, because sources can be forged.
func TestRefusalsOfAllAreLimited(t *testing.T) {
	limited := func(c *DeviceConfig) { c.ICMPPerSecond, c.ICMPBurst = 1, 20 }
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}})
		answered, begin := 0, time.Now()
		for i := range 200 {
			o := w.refused(t, p, tcp(fmt.Sprintf("8.0.100.%d:40000", i+1), clusterIP, "S"))
			answered += int(o.reasons[maps.ReasonRejectNoBackend])
		}
		if most := 21 + int(time.Since(begin).Seconds()); answered < 20 || answered > most {
			t.Errorf("%d of 200 clients were answered, want 20 to %d", answered, most)
		}
	}, limited)
}

// Packets to an address in a ServiceCIDR of no Service are dropped, whatever they are, but not to that of a Service
// which another proxy serves.
func TestUnallocated(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		lab.Must(t, w.hand.ServiceCIDR(w.family.prefix("8.0.96.0/24")))
		w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
		for _, proto := range transports {
			w.ingress(t, p, first(proto, p.client, "8.0.96.200:80")).drops(maps.ReasonDropUnallocated)
		}
		w.ingress(t, p, ping(p.client, "8.0.96.200:0")).drops(maps.ReasonDropUnallocated)
		w.ingress(t, p, protocol(47, p.client, "8.0.96.200:0")).drops(maps.ReasonDropUnallocated)

		in := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, in).becomes(in.to(tapPod), maps.ReasonTranslated)
		w.ingress(t, p, tcp(p.client, "8.0.97.1:80", "S")).passes(maps.ReasonPassOtherTraffic)

		lab.Must(t, w.hand.OtherProxy(w.family.prefix("8.0.96.200/32").Addr()))
		for _, proto := range transports {
			w.ingress(t, p, first(proto, p.client, "8.0.96.200:80")).passes(maps.ReasonPassOtherTraffic)
		}
		w.ingress(t, p, first(layers.IPProtocolTCP, p.client, "8.0.96.201:80")).drops(maps.ReasonDropUnallocated)
	})
}

// The catch-all of a ClusterIP only refuses ports without a frontend.
func TestCatchAll(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
		w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
		for _, in := range []packet{tcp(p.client, clusterIP, "S"), udp(p.client, clusterIP)} {
			backend := map[layers.IPProtocol]string{layers.IPProtocolTCP: tapPod, layers.IPProtocolUDP: portPod}[in.proto]
			w.ingress(t, p, in).becomes(in.to(backend), maps.ReasonTranslated)
		}
		for i, in := range []packet{
			tcp(p.client, clusterIP, "S").toPort(8080), udp(p.client, clusterIP).toPort(8080),
			sctp(p.client, clusterIP, chunkInit), ping(p.client, clusterIP),
		} {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				w.refused(t, p, in).ends(verdictRedirect, maps.ReasonRejectNoPort)
			})
		}
	})
}
