package bpf

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Packets to a Service that begin no connection, and are of none that is known.

const (
	emptyIP = "8.0.96.2:80" // a ClusterIP without backends
	vip     = "8.0.97.7:80" // of a load balancer, on no device
)

// serveForResets publishes the Services of these tests, with all protocols.
func (w *world) serveForResets(t *testing.T) {
	t.Helper()
	for _, proto := range transports {
		w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
		w.serve(t, service{at: []string{emptyIP}, proto: proto})
		w.serve(t, service{at: []string{vip}, kind: maps.KindLoadBalancer, proto: proto, to: []string{portPod}})
	}
}

// resetOf returns the RST that answers a segment: with the number that it acknowledges, or else as its
// acknowledgement.
func resetOf(in packet) packet {
	flags := map[bool]string{true: "R", false: "R."}[in.acknowledges()]
	out := tcp(in.dst.String(), in.src.String(), flags).uncut()
	out.own, out.tags = true, in.tags
	if in.acknowledges() {
		return out.numbered(max(in.ack, 1))
	}

	return out.numbered(^firstNumber + 1).acks(max(in.seq, 1) + uint32(len(in.payload)))
}

// Segments are reset as RFC 9293 says, wherever they go that is a Service's and not the node's own.
func TestResets(t *testing.T) {
	rows := map[string]packet{
		"an acknowledgement":     tcp(client, vip, "."),
		"data":                   tcp(client, vip, "P.").numbered(500).acks(700).with("data"),
		"a FIN":                  tcp(client, vip, "F.").acks(1 << 31),
		"a SYN-ACK":              tcp(client, vip, "S."),
		"without flags":          tcp(client, vip, "").with("data"),
		"a ClusterIP":            tcp(client, clusterIP, "."),
		"no backends":            tcp(client, emptyIP, "."),
		"options":                tcp(client, vip, "P.").withExtras(2).with("data"),
		"a timestamp":            tcp(client, vip, ".").stamped(7),
		"a full segment":         tcp(client, vip, "P.").long(1400),
		"a frame that is filled": tcp(client, vip, ".").padded(20),
		"a VLAN tag":             tcp(client, vip, "P.").tagged(5).with("data"),
		"the last hop":           tcp(client, vip, ".").withHops(1),
	}
	for name, in := range rows {
		t.Run(name, func(t *testing.T) {
			each(t, ethernets, func(t *testing.T, w *world, p place) {
				w.serveForResets(t)
				in := in.from(p.client)
				// What is cut off makes the kernel drop the sum of the device.
				w.unsummed = len(in.transport(w.family)) > 20 || in.padding > 0
				w.ingress(t, p, in).rejects(resetOf(in), maps.ReasonRejectNoFlow)
				w.holds(t, 0, false)
			})
		})
	}
}

// A reset is never answered, and neither is it forwarded.
func TestResetsAreNotReset(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		for _, to := range []string{vip, clusterIP, emptyIP, "8.0.96.2:81"} {
			for _, flags := range []string{"R", "R.", "RF."} {
				w.ingress(t, p, tcp(p.client, to, flags)).drops(maps.ReasonDropNoFlow)
			}
		}
	})
}

// Of SCTP, the answer reflects the tag, and is an ABORT as a rule (RFC 9260, 8.4).
func TestResetsOfSCTP(t *testing.T) {
	const errorCause = 9
	for chunk, answer := range map[uint8]uint8{
		chunkData: chunkAbort, chunkInitAck: chunkAbort, chunkCookieEcho: chunkAbort, chunkShutdown: chunkAbort, 200: chunkAbort,
		chunkShutdownAck: chunkShutdownDone,
		chunkAbort:       0, errorCause: 0, chunkCookieAck: 0, chunkShutdownDone: 0,
	} {
		t.Run(fmt.Sprintf("chunk %d", chunk), func(t *testing.T) {
			each(t, ethernets, func(t *testing.T, w *world, p place) {
				w.serveForResets(t)
				for _, in := range []packet{sctp(p.client, vip, chunk), sctp(p.client, vip, chunk).withExtras(1).long(200)} {
					in = in.bearing("what")
					o := w.refused(t, p, in)
					if answer == 0 {
						o.drops(maps.ReasonDropNoFlow)
						continue
					}
					want := sctp(vip, p.client, answer).with("").reflecting("what").uncut()
					want.own = true
					o.rejects(want, maps.ReasonRejectNoFlow)
				}
			})
		})
	}
}

// What a Service's address does not serve gets the same as a first packet.
func TestSegmentsToUnusedPorts(t *testing.T) {
	each(t, ethernets, func(t *testing.T, w *world, p place) {
		lab.Must(t, w.hand.ServiceCIDR(w.family.prefix("8.0.96.0/24")))
		w.serveForResets(t)
		in := tcp(p.client, clusterIP, "P.").toPort(81).with("data")
		w.refused(t, p, in).rejects(refusalOf(in, nodeAt(p)), maps.ReasonRejectNoPort)
		w.ingress(t, p, tcp(p.client, "8.0.96.200:80", ".")).drops(maps.ReasonDropUnallocated)
		w.ingress(t, p, tcp(p.client, "8.0.96.200:80", "R")).drops(maps.ReasonDropUnallocated)
		// Another machine may have a load balancer's address, or an external one.
		w.ingress(t, p, tcp(p.client, vip, ".").toPort(81)).passes(maps.ReasonPassNoFlow)
	})
}

// What the node has as an address is answered by its stack.
func TestSegmentsToTheNode(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{nodePort}, kind: maps.KindNodePort, to: []string{tapPod}})
		w.serve(t, service{at: []string{nodeOther}, kind: maps.KindLoadBalancer, to: []string{tapPod}})
		w.ingress(t, p, tcp(p.client, node, ".").toPort(30080)).passes(maps.ReasonPassNoFlow)
		w.ingress(t, p, tcp(p.client, nodeOther, ".")).passes(maps.ReasonPassNoFlow)
	})
}

// A connection that netfilter has given to a backend goes on, as kube-proxy's do after a migration; one that
// it has only seen pass does not.
func TestSegmentsThatNetfilterKnows(t *testing.T) {
	needsConntrack(t)
	each(t, ethernets, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		in := tcp(p.client, vip, ".")
		w.track(t, layers.IPProtocolTCP, p.client, vip, p.client, conntrackEstablished)
		w.ingress(t, p, in).rejects(resetOf(in), maps.ReasonRejectNoFlow)

		other := in.fromPort(in.src.Port() + 1)
		w.trackTo(t, layers.IPProtocolTCP, other.src.String(), vip, tapPod)
		for _, flags := range []string{".", "F.", "R"} {
			w.ingress(t, p, tcp(other.src.String(), vip, flags)).passes(maps.ReasonPassNoFlow)
		}
		about := icmpError(tooBig, router, vip, tcp(vip, other.src.String(), "."))
		w.ingress(t, p, about).passes(maps.ReasonPassNoFlow)
	})
}

// Where the kernel does not tell what netfilter tracks, segments go on.
func TestSegmentsThatNetfilterMayKnow(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		for _, flags := range []string{".", "R", "S."} {
			w.ingress(t, p, tcp(p.client, vip, flags)).passes(maps.ReasonPassNoFlow)
		}
		w.ingress(t, p, sctp(p.client, vip, chunkData)).passes(maps.ReasonPassNoFlow)
	}, func(c *DeviceConfig) { c.Conntrack, c.ConntrackHidden = false, true })
}

// trackTo adds a connection to netfilter whose destination has become another one.
func (w *world) trackTo(t testing.TB, proto layers.IPProtocol, from, to, backend string) {
	t.Helper()
	w.trackTuples(t, proto, [2]string{from, to}, [2]string{backend, from}, conntrackEstablished)
}

// All resets together are limited as ICMP errors are; one client gets as many of them as others leave, because
// all of its connections may have come from another node at once.
func TestResetsAreLimited(t *testing.T) {
	limited := func(c *DeviceConfig) { c.ICMPPerSecond, c.ICMPBurst = 1, 20 }
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		answered, begin := 0, time.Now()
		for i := range 200 {
			o := w.ingress(t, p, tcp(p.client, vip, ".").fromPort(uint16(1000+i)))
			answered += int(o.reasons[maps.ReasonRejectNoFlow])
			if o.reasons[maps.ReasonRejectNoFlow]+o.reasons[maps.ReasonRejectLimited] != 1 {
				t.Fatalf("reasons are %v", o.reasons)
			}
		}
		if most := 21 + int(time.Since(begin).Seconds()); answered < 20 || answered > most {
			t.Errorf("%d of 200 segments were answered, want 20 to %d", answered, most)
		}
	}, limited)
}

// Two CPUs that refuse packets at once have one budget.
func TestBudgetOfTwoCPUs(t *testing.T) {
	const perSecond, burst, tries = 20_000, 20, 1000 // until one is answered
	limited := func(c *DeviceConfig) { c.ICMPPerSecond, c.ICMPBurst = perSecond, burst }
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		program, cpus := w.programs(t, p).Ingress, mustCPUs(t, 2)
		frame := w.bytes(p, tcp(p.client, vip, "."), ends{src: macOf(at(p.client).Addr()), dst: w.links[p.device].Attrs().HardwareAddr})
		before, err := w.maps.ReasonCounts()
		lab.Must(t, err)
		begin := time.Now()
		var running errgroup.Group
		for _, cpu := range cpus {
			running.Go(func() error {
				return w.node.Do(func() error {
					if err := stayOn(cpu); err != nil {
						return err
					}
					for time.Since(begin) < 300*time.Millisecond {
						if _, err := program.Run(&ebpf.RunOptions{Data: frame, Context: &skBuff{Ifindex: w.index(p.device)}, Repeat: tries}); err != nil {
							return err
						}
					}

					return nil
				})
			})
		}
		lab.Must(t, running.Wait())
		took := time.Since(begin)
		after, err := w.maps.ReasonCounts()
		lab.Must(t, err)
		answered := int(after[maps.ReasonRejectNoFlow] - before[maps.ReasonRejectNoFlow])
		most := burst + int(took*perSecond/time.Second) + len(cpus)
		if refused := after[maps.ReasonRejectLimited] - before[maps.ReasonRejectLimited]; answered > most || answered < burst {
			t.Errorf("%d segments were answered in %v, and %d not, want %d to %d", answered, took, refused, burst, most)
		}
	}, limited)
}

// Segments from or to many hosts get no answer.
func TestResetsThatAreSilent(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		w.serveForResets(t)
		w.ingress(t, p, tcp("224.0.0.1:40000", vip, ".")).drops(maps.ReasonRejectLimited)
		w.ingress(t, p, tcp("0.0.0.0:40000", vip, ".")).drops(maps.ReasonRejectLimited)
		w.ingress(t, p, tcp(p.client, vip, ".").broadcast()).drops(maps.ReasonRejectLimited)
	})
}

// A segment that its sender left unfinished, or that is yet to be cut, gets a whole reset.
func TestResetsOfOffloads(t *testing.T) {
	for name, test := range map[string]struct {
		in   packet
		kind func(family) uint8
		size uint16
	}{
		"its checksum is to come":      {tcp(client, vip, "P.").with("hello"), nil, 0},
		"its checksum is to come, SYN": {tcp(client, vip, "S.").with("hello"), nil, 0},
		"and it has options":           {tcp(client, vip, "P.").withExtras(1).with("hello"), nil, 0},
		"it is to be cut":              {tcp(client, vip, "P.").long(4001), gsoTCP, 1000},
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				w := newWorld(t, f)
				w.serveForResets(t)
				outside := mustStation(t, w.outside, "eth0")
				w.attach(t, "eth0", netlink.HANDLE_MIN_INGRESS, w.programs(t, uplink).Ingress)
				kind := uint8(gsoNone)
				if test.kind != nil {
					kind = test.kind(f)
				}
				between := ends{src: macOf(test.in.src.Addr()), dst: w.links["eth0"].Attrs().HardwareAddr}
				outside.send(t, test.in.frame(f, between), kind, test.size)
				want := resetOf(test.in)
				got, header := outside.receive(t, want, f)
				if header.GSOType != gsoNone {
					t.Errorf("it came with type %d", header.GSOType)
				}
				o := outcome{t: t, w: w, place: uplink, got: got}
				o.compare(want.frame(f, ends{src: between.dst, dst: between.src}))
			})
		})
	}
}

func gsoTCP(f family) uint8 {
	if f == ipv6 {
		return gsoTCPv6
	}

	return gsoTCPv4
}

// An ICMP error about no connection to a Service would loop as a segment does.
func TestErrorsAboutNoConnection(t *testing.T) {
	each(t, everyplace, func(t *testing.T, w *world, p place) {
		lab.Must(t, w.hand.ServiceCIDR(w.family.prefix("8.0.96.0/24")))
		w.serveForResets(t)
		for _, test := range []struct {
			to   string
			from packet
			want int32
			why  maps.Reason
		}{
			{vip, tcp(vip, p.client, "."), verdictDrop, maps.ReasonDropNoFlow},
			{vip, udp(vip, p.client), verdictDrop, maps.ReasonDropNoFlow},
			{clusterIP, tcp(clusterIP, p.client, "."), verdictDrop, maps.ReasonDropNoFlow},
			{clusterIP, tcp(clusterIP, p.client, ".").fromPort(81), verdictDrop, maps.ReasonDropNoFlow},
			{clusterIP, ping(clusterIP, p.client), verdictDrop, maps.ReasonDropNoFlow},
			{"8.0.96.200:80", tcp("8.0.96.200:80", p.client, "."), verdictDrop, maps.ReasonDropUnallocated},
			{vip, tcp(vip, p.client, ".").fromPort(81), verdictNext, maps.ReasonPassNoFlow},
			{vip, ping(vip, p.client), verdictNext, maps.ReasonPassNoFlow},
		} {
			w.ingress(t, p, icmpError(hostUnreachable, p.client, test.to, test.from)).ends(test.want, test.why)
		}
	})
}

// acknowledges reports whether a segment has the ACK flag.
func (p packet) acknowledges() bool { return strings.Contains(p.flags, ".") }
