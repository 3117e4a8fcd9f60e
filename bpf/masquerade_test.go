package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Clients are masqueraded if the backend's reply would bypass this node, or the client is the backend.
func TestMasqueradedClients(t *testing.T) {
	bridged := place{device: "port0", client: "8.0.1.2:40000", class: maps.DevicePods, bridgePort: true}
	routed := place{device: "tap0", client: "8.0.4.2:40000", class: maps.DevicePods}
	forwarded := []place{
		{device: "tap0", client: "8.0.120.5:40000", class: maps.DevicePods},
		{device: "port0", client: "8.0.121.5:40000", class: maps.DevicePods, bridgePort: true},
		{device: "tap0", client: "8.0.130.5:40000", class: maps.DevicePods}, // the way there is the default route
	}
	for _, test := range []struct {
		name    string
		at      []place
		backend string
		here    bool // the backend is said to be
		flags   uint16
		source  string // of what the backend sees; "" is the client
	}{
		{name: "not a client outside, of a pod here", at: uplinks, backend: tapPod},
		{name: "a client outside, of a pod on another node", at: uplinks, backend: remotePod, source: node},
		{name: "not a pod, of a pod here", at: podPlaces, backend: tapPod},
		{name: "not a pod, of a pod on another node", at: podPlaces, backend: remotePod},
		{name: "a client outside, of a backend that is said to be here, and is not", at: uplinks, backend: remotePod, here: true, source: node},
		{name: "not a pod, of a backend that is said to be here, and is not", at: podPlaces, backend: remotePod, here: true},
		{name: "a client for which a pod forwards, of a pod on another node", at: forwarded, backend: remotePod, source: node},
		{name: "not a client for which a pod forwards, of a pod here", at: forwarded, backend: tapPod},
		{name: "not a client outside, of this node", at: uplinks, backend: hostPod},
		{name: "no client, of a backend that has the node's address", at: everyplace, backend: hostPod, flags: maps.PoolMasquerade},
		{name: "every client, of a pod here, if the pool requires it", at: everyplace, backend: portPodToo, flags: maps.PoolMasquerade, source: bridge},
		{name: "every client, of a pod elsewhere, if the pool requires it", at: everyplace, backend: remotePod, flags: maps.PoolMasquerade, source: node},
		{name: "a pod of a bridge that dials itself", at: []place{bridged}, backend: portPod, source: bridge},
		{name: "a pod that dials itself", at: []place{routed}, backend: tapPod, source: "8.0.4.1:0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, test.at, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, to: []string{test.backend}, here: test.here, flags: test.flags})
				in := tcp(p.client, clusterIP, "S")
				w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
				f := w.flowOf(t, p.client, clusterIP)
				if f.IsMasqueraded() != (test.source != "") {
					t.Fatalf("masqueraded is %v: %+v", f.IsMasqueraded(), f)
				}
				if test.source == "" {
					w.holds(t, 2, true)

					return
				}
				w.holds(t, 4, true)
				source := f.MasqueradeAddrPort()
				if want := w.family.addr(at(test.source).Addr()); source.Addr() != want {
					t.Errorf("the backend sees %s, want %s", source.Addr(), want)
				}
				if source.Port() < DefaultMasqueradePorts.Low || source.Port() > DefaultMasqueradePorts.High {
					t.Errorf("port %d is outside of the window", source.Port())
				}
			})
		})
	}
}

// All four directions of a masqueraded flow, from every place of a client.
func TestMasquerade(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			each(t, everyplace, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{remotePod}, flags: maps.PoolMasquerade})
				converseMasqueraded(t, w, p, proto, unchanged)
				w.holds(t, 4, false)
			})
		})
	}
}

// The backend sees an address of the device by which the stack has sent the first packet, and that address stays. The
// program expects eth0 as the way to remotePod, and eth1 to farPod, whose route prefers another source.
func TestMasqueradeOfTheDevice(t *testing.T) {
	eth1 := place{device: "eth1", class: maps.DeviceUplink}
	prefers := nodePrefers
	if !atLeast(t, 6, 7) {
		prefers = nodeOther // the kernel does not return what a route prefers
	}
	for _, test := range []struct {
		name, backend, source string
		leaves, later         place
		from                  place
	}{
		{name: "another one than expected", from: uplink, backend: remotePod, leaves: eth1, later: uplink, source: nodeOther},
		{name: "another one than expected, of a pod", from: podVeth, backend: remotePod, leaves: eth1, later: eth1, source: nodeOther},
		{name: "the expected one", from: uplink, backend: remotePod, leaves: uplink, later: eth1, source: node},
		{name: "the expected one, by a route with a source", from: uplink, backend: farPod, leaves: eth1, later: eth1, source: prefers},
		{name: "another one than that of a route with a source", from: uplink, backend: farPod, leaves: uplink, later: eth1, source: node},
	} {
		for _, proto := range transports {
			t.Run(fmt.Sprintf("%s, %s", test.name, proto), func(t *testing.T) {
				each(t, []place{test.from}, func(t *testing.T, w *world, p place) {
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{test.backend}, flags: maps.PoolMasquerade})
					w.ingress(t, p, first(proto, p.client, clusterIP)).
						becomes(first(proto, p.client, test.backend), maps.ReasonTranslated)
					leaving := w.egress(t, test.leaves, first(proto, p.client, test.backend))
					f := w.flowOf(t, p.client, clusterIP)
					port := maps.Port(f.MasqueradePort)
					out := func(what packet) packet { return what.from(test.source).fromPort(port) }
					back := func(what packet) packet { return what.to(test.source).toPort(port) }
					leaving.becomes(out(first(proto, p.client, test.backend)), maps.ReasonFlow)
					w.holds(t, 4, true)
					for _, e := range w.entries(t) {
						if e.flow.MasqueradeAddrPort() != f.MasqueradeAddrPort() || e.flow.Flags&maps.FlowSent == 0 {
							t.Errorf("the entry of role %d has the masquerade %s, flags %#x", e.flow.Role, e.flow.MasqueradeAddrPort(), e.flow.Flags)
						}
					}

					w.ingress(t, test.leaves, back(answer(proto, test.backend, p.client))).
						becomes(answer(proto, test.backend, p.client), maps.ReasonFlow)
					w.egress(t, p, answer(proto, test.backend, p.client)).
						becomes(answer(proto, clusterIP, p.client), maps.ReasonFlow)
					w.ingress(t, p, second(proto, p.client, clusterIP)).
						becomes(second(proto, p.client, test.backend), maps.ReasonFlow)
					w.egress(t, test.later, second(proto, p.client, test.backend)).
						becomes(out(second(proto, p.client, test.backend)), maps.ReasonFlow)
				})
			})
		}
	}
}

// A pod that connects to itself through its Service sees the node, even from the very port on which it
// answers.
func TestHairpin(t *testing.T) {
	for _, proto := range transports {
		t.Run(fmt.Sprint(proto), func(t *testing.T) {
			for _, test := range []struct {
				at           place
				self, source string
			}{
				{place{device: "port0", client: "8.0.1.2:40000", class: maps.DevicePods, bridgePort: true}, portPod, bridge},
				{place{device: "tap0", client: "8.0.4.2:40000", class: maps.DevicePods}, tapPod, "8.0.4.1:0"},
				{place{device: "port0", client: portPod, class: maps.DevicePods, bridgePort: true}, portPod, bridge},
			} {
				t.Run("from "+test.at.client, func(t *testing.T) {
					each(t, []place{test.at}, func(t *testing.T, w *world, p place) {
						w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{test.self}})
						dialItself(t, w, p, proto, test.self, test.source)
					})
				})
			}
		})
	}
}

func dialItself(t *testing.T, w *world, p place, proto layers.IPProtocol, self, source string) {
	t.Helper()
	in := first(proto, p.client, clusterIP)
	o := w.ingress(t, p, in)
	f := w.flowOf(t, p.client, clusterIP)
	seen, port := maps.Port(f.StackPort), maps.Port(f.MasqueradePort)
	if (seen != in.src.Port()) != (p.client == self) {
		t.Errorf("the stack sees port %d of %s", seen, p.client)
	}
	o.becomes(in.to(self).fromPort(seen), maps.ReasonTranslated)
	for _, says := range []func(layers.IPProtocol, string, string) packet{answer, third} {
		out := in.to(self).fromPort(seen)
		w.egress(t, p, out).becomes(out.from(source).fromPort(port), maps.ReasonFlow)
		back := says(proto, self, source).toPort(port)
		w.ingress(t, p, back).becomes(back.to(p.client).toPort(seen), maps.ReasonFlow)
		back = back.to(p.client).toPort(seen)
		w.egress(t, p, back).becomes(back.from(clusterIP).to(p.client), maps.ReasonFlow)
		in = second(proto, p.client, clusterIP)
		w.ingress(t, p, in).becomes(in.to(self).fromPort(seen), maps.ReasonFlow)
	}
	w.holds(t, 4, false)
}

// The source is the one that the kernel would choose on the route to the backend, if it reports it, or else
// that of the device; never a link-local one.
func TestMasqueradeSource(t *testing.T) {
	kernelTells := func(c *DeviceConfig) { c.FIBSource = true }
	deviceTells := func(c *DeviceConfig) { c.FIBSource, c.ChecksumIPv6 = false, false }
	for _, test := range []struct {
		name    string
		old     bool // the kernel does not report the source
		only    family
		backend string
		source  string // "": there is none
	}{
		{name: "of the uplink", backend: remotePod, source: node},
		{name: "of the uplink, on an old kernel", old: true, backend: remotePod, source: node},
		{name: "of the route", backend: farPod, source: nodePrefers},
		{name: "of the other uplink, on an old kernel", old: true, backend: farPod, source: nodeOther},
		{name: "not there, where all is link-local", only: ipv4, backend: lonelyPod},
		{name: "not there, where all is link-local, on an old kernel", old: true, backend: lonelyPod},
		{name: "not there, without a way", backend: nowhere},
		{name: "not there, without a way, on an old kernel", old: true, backend: nowhere},
	} {
		t.Run(test.name, func(t *testing.T) {
			option := kernelTells
			if test.old {
				option = deviceTells
			} else if !atLeast(t, 6, 7) {
				t.Skip("this kernel does not report sources (Linux 6.7)")
			}
			each(t, uplinks, func(t *testing.T, w *world, p place) {
				if test.only != 0 && test.only != w.family {
					return
				}
				w.unsummed = true
				w.serve(t, service{at: []string{clusterIP}, to: []string{test.backend}})
				in := tcp(p.client, clusterIP, "S")
				if test.source == "" {
					w.ingress(t, p, in).drops(maps.ReasonDropMasqueradeAddr)
					w.holds(t, 0, false)

					return
				}
				w.ingress(t, p, in).becomes(in.to(test.backend), maps.ReasonTranslated)
				have, want := w.flowOf(t, p.client, clusterIP).MasqueradeAddrPort().Addr(), w.family.addr(at(test.source).Addr())
				if have != want {
					t.Errorf("source is %s, want %s", have, want)
				}
			}, option)
		})
	}
}

// A device without an IPv6 address of its own may use another's, as the kernel
// does, but not a link-local one.
func TestMasqueradeSourceOfALinkLocalDevice(t *testing.T) {
	if !atLeast(t, 6, 7) {
		t.Skip("this kernel does not report sources (Linux 6.7)")
	}
	w := newWorld(t, ipv6)
	w.serve(t, service{at: []string{clusterIP}, to: []string{lonelyPod}})
	in := tcp(client, clusterIP, "S")
	w.ingress(t, uplink, in).becomes(in.to(lonelyPod), maps.ReasonTranslated)
	source := w.flowOf(t, client, clusterIP).MasqueradeAddrPort().Addr()
	use, ok, err := w.maps.Addrs.Lookup(maps.AddrOf(source))
	lab.Must(t, err)
	if !ok || use.Flags&maps.AddrNode == 0 || source.IsLinkLocalUnicast() {
		t.Errorf("source is %s", source)
	}
}

// clientAt returns the address of a client by number.
func clientAt(i int) string { return fmt.Sprintf("8.0.100.%d:%d", 10+i/100, 41000+i%100) }

// Datagrams of one client try the same port first, so that a node that has lost its flows assigns the same
// port.
func TestMasqueradePortIsDerived(t *testing.T) {
	eachFamily(t, func(t *testing.T, f family) {
		var ports [2][]uint16
		for round := range ports {
			w := newWorld(t, f)
			w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{remotePod}})
			for i := range 20 {
				w.ingress(t, uplink, udp(clientAt(i), clusterIP)).ends(verdictNext, maps.ReasonTranslated)
				ports[round] = append(ports[round], w.flowOf(t, clientAt(i), clusterIP).MasqueradePort)
			}
		}
		if fmt.Sprint(ports[0]) != fmt.Sprint(ports[1]) {
			t.Errorf("ports are %v, they were %v", ports[1], ports[0])
		}
	})
}

// With two ports, two flows to a backend have one each, another backend has two of its own, and a third flow
// has none.
func TestMasqueradePortsRunOut(t *testing.T) {
	window := func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20001} }
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		const otherPod, otherIP = "8.0.2.8:8080", "8.0.96.2:80"
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		w.serve(t, service{at: []string{otherIP}, to: []string{otherPod}})
		for _, vip := range []string{clusterIP, otherIP} {
			taken := make(map[uint16]bool)
			for i := range 2 {
				w.ingress(t, p, tcp(clientAt(i), vip, "S")).ends(verdictNext, maps.ReasonTranslated)
				port := maps.Port(w.flowOf(t, clientAt(i), vip).MasqueradePort)
				if port < 20000 || port > 20001 || taken[port] {
					t.Errorf("port is %d, taken are %v", port, taken)
				}
				taken[port] = true
			}
		}
		w.holds(t, 16, true)
		w.ingress(t, p, tcp(clientAt(2), clusterIP, "S")).drops(maps.ReasonDropMasqueradePort)
		w.holds(t, 16, true)
		for _, e := range w.entries(t) {
			if e.flow.MasqueradePort != 0 && e.flow.Client == w.mapAddr(clientAt(2)) && e.flow.ClientPort == maps.Port(at(clientAt(2)).Port()) {
				t.Errorf("an entry is left of a flow that is none: %+v", e)
			}
		}
	}, window)
}

// Where all ports are held, first packets look for one at length once in 100 ms, until there is a free one again.
func TestMasqueradePortsAreScarce(t *testing.T) {
	const all, few, pause = 64, 24, 100 * time.Millisecond
	each(t, ways, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
		c.first(t, maps.ReasonTranslated)
		c.establish(t)
		tries := func() uint64 {
			return w.counted(t, func() {
				w.ingress(t, p, tcp(stranger, clusterIP, "S")).drops(maps.ReasonDropMasqueradePort)
			}).MasqueradeRetries
		}
		// What takes longer than the pause, as on a busy machine, shows nothing.
		for attempts := 1; ; attempts++ {
			time.Sleep(pause + time.Millisecond) // another test may have used up these ports
			begin := time.Now()
			first, second := tries(), tries()
			if took := time.Since(begin); took > pause && attempts < 100 {
				continue
			}
			if first != all || second != few {
				t.Errorf("ports were tried %d times, and then %d, want %d and %d", first, second, all, few)
			}

			break
		}
		c.returns(t, tcp(client, client, "R."))
		c.place.client = stranger
		c.first(t, maps.ReasonTranslated)
		c.establish(t)
		if n := w.counted(t, func() {
			w.ingress(t, p, tcp("8.0.100.77:40000", clusterIP, "S")).drops(maps.ReasonDropMasqueradePort)
		}).MasqueradeRetries; n != all {
			t.Errorf("%d ports were tried after one was free, want %d", n, all)
		}
	}, onePort)
}

// A port of a masquerade is free again when its flow has ended.
func TestMasqueradePortIsFreeAgain(t *testing.T) {
	window := func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20000} }
	each(t, ways, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
		c.first(t, maps.ReasonTranslated)
		c.establish(t)
		in := tcp(stranger, clusterIP, "S")
		w.ingress(t, p, in).drops(maps.ReasonDropMasqueradePort)

		c.returns(t, tcp(client, client, "R.")) // and it was reset
		c.place.client = stranger
		c.first(t, maps.ReasonTranslated)
		c.leaves(t, tcp(client, client, "S"))
		c.returns(t, tcp(client, client, "S."))
	}, window)
}

// A flood of first packets must not hold all ports for long: an unanswered one is free again soon. A client
// that retransmits still gets its own.
func TestMasqueradePortOfAnUnansweredFlow(t *testing.T) {
	window := func(c *DeviceConfig) { c.MasqueradePorts = PortRange{Low: 20000, High: 20000} }
	for name, retries := range map[string]bool{"free": false, "kept by a retransmission": true} {
		t.Run(name, func(t *testing.T) {
			each(t, ways, func(t *testing.T, w *world, p place) {
				w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
				c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: remotePod, masqueradedPort: 20000}
				c.first(t, maps.ReasonTranslated)
				w.wait(t, 2*time.Second)
				if retries {
					c.first(t, maps.ReasonFlow)
					c.leaves(t, tcp(client, client, "S"))
				}
				w.wait(t, 2*time.Second)
				in := tcp(stranger, clusterIP, "S")
				if retries {
					w.ingress(t, p, in).drops(maps.ReasonDropMasqueradePort)

					return
				}
				c.place.client = stranger
				c.first(t, maps.ReasonTranslated)
			}, window)
		})
	}
}
