package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// many are so many backends that a new random choice is another one.
func many(n int) []string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("8.0.4.%d:8080", i+10))
	}

	return all
}

// The first packet of a client that already has a flow.
func TestFirstPacketAgain(t *testing.T) {
	type says func(c *conversation, t *testing.T)
	client := func(p packet) says { return func(c *conversation, t *testing.T) { c.says(t, p) } }
	backend := func(p packet) says { return func(c *conversation, t *testing.T) { c.hears(t, p) } }
	elsewhere := func(p packet) says { return func(c *conversation, t *testing.T) { c.sendsElsewhere(t, p) } }
	tcpWith := func(flags string) packet { return tcp(stranger, stranger, flags) }
	sctpWith := func(chunk uint8) packet { return sctp(stranger, stranger, chunk) }
	open := func(and ...says) []says { return append([]says{backend(tcpWith("S.")), client(tcpWith("."))}, and...) }
	pause := func(c *conversation, t *testing.T) { c.w.wait(t, 11*time.Second) }
	second := func(c *conversation, t *testing.T) { c.w.wait(t, time.Second) }

	for _, test := range []struct {
		name  string
		proto layers.IPProtocol
		after []says
		anew  bool
	}{
		{name: "a retransmitted SYN", proto: layers.IPProtocolTCP},
		{name: "a SYN whose answer got lost", proto: layers.IPProtocolTCP, after: []says{backend(tcpWith("S."))}},
		{name: "a SYN on an established connection", proto: layers.IPProtocolTCP, after: []says{backend(tcpWith("S.")), client(tcpWith(".")), backend(tcpWith("."))}},
		{name: "a SYN after the client's FIN", proto: layers.IPProtocolTCP, after: open(client(tcpWith("F.")), backend(tcpWith(".").acks(2)))},
		{name: "a SYN after the backend's FIN", proto: layers.IPProtocolTCP, after: open(backend(tcpWith("F.")), client(tcpWith(".").acks(2)))},
		{name: "a SYN after FINs of both, of which one was acknowledged", proto: layers.IPProtocolTCP, after: open(client(tcpWith("F.")), backend(tcpWith("F.").acks(2)))},
		{name: "a SYN after FINs of both", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith("F.")), backend(tcpWith("F.").acks(2)), client(tcpWith(".").numbered(2).acks(2)))},
		{name: "a SYN after forged FINs of both", proto: layers.IPProtocolTCP, after: open(client(tcpWith("F.").numbered(500)), backend(tcpWith("F.").numbered(600)))},
		{name: "a SYN after the client's RST", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith("R")))},
		{name: "a SYN after the backend's RST", proto: layers.IPProtocolTCP, anew: true, after: open(backend(tcpWith("R.")))},
		{name: "a SYN after an RST that the backend may not have taken", proto: layers.IPProtocolTCP, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)))},
		{name: "a SYN after such an RST, and 11 s", proto: layers.IPProtocolTCP, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), pause)},
		{name: "a SYN after such an RST, 11 s and an answer", proto: layers.IPProtocolTCP, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), pause, backend(tcpWith(".").acks(1)))},
		{name: "a SYN after such an RST of a number that a forger made believe, and 11 s", proto: layers.IPProtocolTCP, after: open(client(tcpWith(".").numbered(5000)), client(tcpWith("R").numbered(5000)), pause)},
		{name: "a SYN that the backend answered as of the connection before", proto: layers.IPProtocolTCP, after: open(client(tcpWith(".").numbered(5000)), client(tcpWith("R").numbered(5000)), pause, client(tcpWith("S").numbered(700)), backend(tcpWith(".").acks(1)), second)},
		{name: "a SYN that the backend did not answer after such an RST", proto: layers.IPProtocolTCP, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), pause, client(tcpWith("S").numbered(700)), second)},
		{name: "a SYN after such an RST again, which the backend has not answered either", proto: layers.IPProtocolTCP, after: open(client(tcpWith(".").numbered(5000)), client(tcpWith("R").numbered(5000)), pause, client(tcpWith("R").numbered(5000)), second)},
		{name: "a SYN that the backend refused after such an RST", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), client(tcpWith("S").numbered(700)), backend(tcpWith("R.").numbered(^firstNumber+1).acks(701)))},
		{name: "a SYN after an RST of a number that is none of the backend's", proto: layers.IPProtocolTCP, after: open(backend(tcpWith("R.").numbered(^firstNumber + 1).acks(1)))},
		{name: "a SYN that the backend did not answer", proto: layers.IPProtocolTCP, after: open(pause, client(tcpWith("S").numbered(700)), second)},
		{name: "a SYN after an RST whose data the backend acknowledged later", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), backend(tcpWith(".").acks(6)))},
		{name: "a SYN after an RST of the backend whose data the client acknowledged later", proto: layers.IPProtocolTCP, anew: true, after: open(backend(tcpWith("P.").with("hello")), backend(tcpWith("R.").numbered(6)), client(tcpWith(".").acks(6)))},
		{name: "a SYN after an RST whose data the backend acknowledged in part", proto: layers.IPProtocolTCP, after: open(client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)), backend(tcpWith(".").acks(3)))},
		{name: "a SYN after such an RST, and after the backend accepted one and both closed", proto: layers.IPProtocolTCP, anew: true, after: open(
			client(tcpWith("P.").with("hello")), client(tcpWith("R.").numbered(6)),
			client(tcpWith("S").numbered(1<<29)), backend(tcpWith("S.").numbered(1<<30).acks(1<<29+1)), client(tcpWith(".").numbered(1<<29+1).acks(1<<30+1)),
			client(tcpWith("F.").numbered(1<<29+1).acks(1<<30+1)), backend(tcpWith("F.").numbered(1<<30+1).acks(1<<29+2)), client(tcpWith(".").numbered(1<<29+2).acks(1<<30+2)))},
		{name: "a SYN after forged ones of both, and FINs of these", proto: layers.IPProtocolTCP, after: open(
			client(tcpWith("S").numbered(1<<29)), backend(tcpWith("S.").numbered(1<<30).acks(1<<29+1)),
			client(tcpWith("F.").numbered(1<<29+1).acks(1<<30+1)), backend(tcpWith("F.").numbered(1<<30+1).acks(1<<29+2)), client(tcpWith(".").numbered(1<<29+2).acks(1<<30+2)))},
		{name: "a SYN after a forged RST", proto: layers.IPProtocolTCP, after: open(client(tcpWith("R").numbered(700)), backend(tcpWith("R.").numbered(700)), pause)},
		{name: "a SYN after RSTs of what a forged SYN has begun", proto: layers.IPProtocolTCP, after: open(client(tcpWith("S").numbered(700)), client(tcpWith("R").numbered(701)), client(tcpWith("R.").numbered(701).acks(700)), pause)},
		{name: "a SYN after a forged SYN, and FINs of both", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith("S").numbered(700)), backend(tcpWith("F.")), client(tcpWith("F.").acks(2)), backend(tcpWith(".").numbered(2).acks(2)))},
		{name: "a SYN after forged segments far away, and FINs of both", proto: layers.IPProtocolTCP, anew: true, after: open(client(tcpWith(".").numbered(1<<25).acks(1<<30)), backend(tcpWith("F.")), client(tcpWith("F.").acks(2)), backend(tcpWith(".").numbered(2).acks(2)))},
		{name: "the SYN of a client that has forgotten the connection", proto: layers.IPProtocolTCP, anew: true, after: open(
			client(tcpWith("P.").with("hello")), backend(tcpWith("P.").acks(6).with("world")), client(tcpWith(".").numbered(6).acks(6)),
			client(tcpWith("S").numbered(90_000)), backend(tcpWith(".").numbered(6).acks(6)), client(tcpWith("R").numbered(6)))},
		{name: "a SYN after a refused one", proto: layers.IPProtocolTCP, anew: true, after: []says{backend(tcpWith("R."))}},
		{name: "a retransmitted INIT", proto: layers.IPProtocolSCTP},
		{name: "an INIT on an association", proto: layers.IPProtocolSCTP, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho))}},
		{name: "an INIT after a forged ABORT", proto: layers.IPProtocolSCTP, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho)), elsewhere(sctpWith(chunkAbort).bearing("else")), client(sctpWith(chunkAbort).bearing("else")), client(sctpWith(chunkAbort).reflecting("else"))}},
		{name: "an INIT after an ABORT with the tag of what it answers", proto: layers.IPProtocolSCTP, anew: true, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho)), backend(sctpWith(chunkAbort).reflecting(association))}},
		{name: "an INIT after a refused one", proto: layers.IPProtocolSCTP, anew: true, after: []says{backend(sctpWith(chunkAbort))}},
		{name: "an INIT after a forged SHUTDOWN", proto: layers.IPProtocolSCTP, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho)), client(sctpWith(chunkShutdown).bearing("else")), elsewhere(sctpWith(chunkShutdownAck).bearing("else"))}},
		{name: "an INIT after an ABORT", proto: layers.IPProtocolSCTP, anew: true, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho)), backend(sctpWith(chunkAbort))}},
		{name: "an INIT after a SHUTDOWN", proto: layers.IPProtocolSCTP, anew: true, after: []says{backend(sctpWith(chunkInitAck)), client(sctpWith(chunkCookieEcho)), client(sctpWith(chunkShutdown))}},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				backends := many(16)
				w.serve(t, service{at: []string{clusterIP}, proto: test.proto, to: backends})
				in := first(test.proto, p.client, clusterIP)
				w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)
				c := &conversation{w: w, place: p, proto: test.proto, vip: clusterIP}
				c.backend = w.backendOf(t, w.flowOf(t, p.client, clusterIP), backends...)
				for _, says := range test.after {
					says(c, t)
				}
				if test.anew {
					w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)

					return
				}
				for range 10 {
					c.first(t, maps.ReasonFlow)
				}
			})
		})
	}
}

// A SYN on a flow that has ended gets a backend like any other first packet, and late packets of the old
// backend do no harm.
func TestNewFlowInThePlaceOfAnOldOne(t *testing.T) {
	for _, backends := range [][2]string{{portPod, tapPod}, {remotePod, farPod}} {
		t.Run(fmt.Sprintf("from %s to %s", backends[0], backends[1]), func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, layers.IPProtocolTCP, backends[0])
				c.establish(t)
				c.closes(t)

				old := *c
				w.serve(t, service{at: []string{clusterIP}, to: backends[1:]})
				c.backend = backends[1]
				c.first(t, maps.ReasonTranslated)
				c.masqueradedPort = maps.Port(w.flowOf(t, client, clusterIP).MasqueradePort)
				c.first(t, maps.ReasonFlow)

				w.wait(t, 1100*time.Millisecond)
				late := tcp(old.backend, p.client, "F.") // again, for its ACK got lost
				w.egress(t, p, late)
				if old.masqueradedPort != 0 {
					w.ingress(t, uplink, late.to(node).toPort(old.masqueradedPort))
				}
				c.first(t, maps.ReasonFlow)
				c.establishFrom(t)
				w.wait(t, 1100*time.Millisecond)
				w.egress(t, p, late)
				c.says(t, tcp(client, client, "P.").with("go on"))
			})
		})
	}
}

// closes has both sides of an established connection close it, the backend first.
func (c *conversation) closes(t *testing.T) {
	t.Helper()
	c.hears(t, tcp(client, client, "F."))
	c.says(t, tcp(client, client, "F.").acks(2))
	c.hears(t, tcp(client, client, ".").numbered(2).acks(2))
}

// establishFrom is establish for a backend of any kind.
func (c *conversation) establishFrom(t *testing.T) {
	t.Helper()
	c.hears(t, answer(c.proto, c.backend, c.place.client))
	c.says(t, second(c.proto, c.place.client, c.vip))
}

// An open connection stays with its backend when that is removed, and a client
// that connects anew gets another one.
func TestBackendGone(t *testing.T) {
	for _, proto := range []layers.IPProtocol{layers.IPProtocolTCP, layers.IPProtocolSCTP} {
		for _, established := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, established: %v", proto, established), func(t *testing.T) {
				each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
					s := w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
					c := &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: portPod}
					c.first(t, maps.ReasonTranslated)
					if established {
						c.establish(t)
					}
					w.removeBackend(t, s, portPod)
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{tapPod}})
					if established {
						c.says(t, second(proto, client, clusterIP))
						c.hears(t, answer(proto, portPod, client))
					}
					c.backend = tapPod
					c.first(t, maps.ReasonTranslated)
				})
			})
		}
	}
}

// A backend's id may have been given to another Service meanwhile.
func TestBackendIDOfAnotherService(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		in := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)

		other := w.serve(t, service{at: []string{"8.0.96.9:80"}})
		id := s.backends[portPod]
		lab.Must(t, w.maps.Backends.Put(id, maps.BackendOf(id, other.id, w.family.addrPort(at(tapPod)), maps.BackendLocal)))
		w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
		w.ingress(t, p, in).becomes(in.to(tapPod), maps.ReasonTranslated)
	})
}

// The id of a backend that is gone does not lead to the next one in its place, which has another id.
func TestBackendIDOfAnEarlierBackend(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: []string{portPod}})
		in := tcp(p.client, clusterIP, "S")
		w.ingress(t, p, in).becomes(in.to(portPod), maps.ReasonTranslated)

		id := s.backends[portPod]
		next := maps.ID(maps.Index(id), maps.Generation(id)+1)
		lab.Must(t, w.maps.Backends.Put(maps.Index(id), maps.BackendOf(next, s.id, w.family.addrPort(at(tapPod)), maps.BackendLocal)))
		w.replace(t, clusterIP, layers.IPProtocolTCP, maps.Pool{ServicePortId: s.id}, w.putBackend(t, s.id, tapPod, true))
		w.ingress(t, p, in).becomes(in.to(tapPod), maps.ReasonTranslated)
	})
}

// How long a UDP flow keeps its backend.
func TestUDPFlowEnds(t *testing.T) {
	const second = time.Second
	for _, test := range []struct {
		name     string
		answered bool
		quiet    []time.Duration // pauses; after each, the backend says something, but not after the last
		speaks   bool            // the backend, also after the last
		gone     bool            // the backend, from the map
		drains   bool            // from the slots
		anew     bool
	}{
		{name: "not after 29 s without an answer", quiet: []time.Duration{29 * second}},
		{name: "after 31 s without an answer", quiet: []time.Duration{31 * second}, anew: true},
		{name: "not after 119 s", answered: true, quiet: []time.Duration{119 * second}},
		{name: "after 121 s", answered: true, quiet: []time.Duration{121 * second}, anew: true},
		{name: "not while the backend speaks", answered: true, quiet: []time.Duration{100 * second, 100 * second, 100 * second}},
		{name: "when the backend is gone", answered: true, quiet: []time.Duration{2 * second}, gone: true, anew: true},
		{name: "when a backend is gone that goes on speaking", answered: true, quiet: []time.Duration{2 * second}, speaks: true, gone: true, anew: true},
		{name: "when a backend that did not answer is gone", quiet: []time.Duration{2 * second}, gone: true, anew: true},
		{name: "not when the backend drains", answered: true, quiet: []time.Duration{2 * second}, drains: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				s := w.serve(t, service{at: []string{clusterIP}, proto: layers.IPProtocolUDP, to: []string{portPod}})
				c := &conversation{w: w, place: p, proto: layers.IPProtocolUDP, vip: clusterIP, backend: portPod}
				c.first(t, maps.ReasonTranslated)
				if test.answered {
					c.hears(t, udp(portPod, client))
				}
				for i, pause := range test.quiet {
					w.wait(t, pause)
					if i < len(test.quiet)-1 || test.speaks {
						c.hears(t, udp(portPod, client))
					}
				}
				if test.gone {
					w.removeBackend(t, s, portPod)
				}
				// The new choice is another backend of the same Service.
				w.replace(t, clusterIP, layers.IPProtocolUDP, maps.Pool{ServicePortId: s.id}, w.putBackend(t, s.id, tapPod, true))
				if test.anew {
					c.backend = tapPod
					c.first(t, maps.ReasonTranslated)
					return
				}
				c.first(t, maps.ReasonFlow)
			})
		})
	}
}
