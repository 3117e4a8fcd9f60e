package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// conversation is a flow of a test: a client, a VIP, and a backend.
type conversation struct {
	w               *world
	place           place
	proto           layers.IPProtocol
	vip             string
	backend         string
	masqueradedPort uint16 // 0: not masqueraded
}

// begin publishes the ClusterIP with a backend, and has the client of a place send its first packet.
func begin(t *testing.T, w *world, p place, proto layers.IPProtocol, backend string) *conversation {
	t.Helper()
	w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{backend}})
	c := &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: backend}
	c.first(t, maps.ReasonTranslated)
	c.masqueradedPort = maps.Port(w.flowOf(t, p.client, clusterIP).MasqueradePort)

	return c
}

// isTurned reports whether the packets of the conversation bypass the stack.
func (c *conversation) isTurned() bool {
	return c.w.turns && c.place.turns && isRemote(c.backend)
}

// goesOn checks that what the client sent goes on to the backend.
func (c *conversation) goesOn(o outcome, why maps.Reason) {
	o.t.Helper()
	if c.isTurned() {
		port := maps.Port(c.w.flowOf(o.t, c.place.client, c.vip).MasqueradePort)
		o.leaves(o.in.from(node).fromPort(port).to(c.backend), why)
	} else {
		o.becomes(o.in.to(c.backend), why)
	}
}

// first sends the first packet of the client, or retransmits it.
func (c *conversation) first(t *testing.T, why maps.Reason) {
	t.Helper()
	in := first(c.proto, c.place.client, c.vip)
	c.goesOn(c.w.ingress(t, c.place, in), why)
}

// says sends a packet of the client.
func (c *conversation) says(t *testing.T, in packet) {
	t.Helper()
	c.goesOn(c.w.ingress(t, c.place, in.from(c.place.client).to(c.vip)), maps.ReasonFlow)
}

// leaves sends a packet of a masqueraded flow through egress to the backend, unless it was turned around.
func (c *conversation) leaves(t *testing.T, in packet) {
	t.Helper()
	if c.isTurned() {
		return
	}
	in = in.from(c.place.client).to(c.backend)
	c.w.egress(t, uplink, in).becomes(in.from(node).fromPort(c.masqueradedPort), maps.ReasonFlow)
}

// returns sends an answer of the backend of a masqueraded flow through ingress.
func (c *conversation) returns(t *testing.T, in packet) {
	t.Helper()
	in = in.from(c.backend).to(node).toPort(c.masqueradedPort)
	if c.isTurned() {
		c.w.ingress(t, uplink, in).leaves(in.from(c.vip).to(c.place.client), maps.ReasonFlow)
	} else {
		c.w.ingress(t, uplink, in).becomes(in.to(c.place.client), maps.ReasonFlow)
	}
}

// hears sends an answer to the client, through all hooks that it passes.
func (c *conversation) hears(t *testing.T, in packet) {
	t.Helper()
	if c.isTurned() {
		c.returns(t, in)
		return
	}
	in = in.from(c.backend).to(c.place.client)
	c.w.egress(t, c.place, in).becomes(in.from(c.vip), maps.ReasonFlow)
}

// sendsElsewhere sends a packet of the backend to the client's port that is of another connection.
func (c *conversation) sendsElsewhere(t *testing.T, in packet) {
	t.Helper()
	c.w.egress(t, c.place, in.from(c.backend).to(c.place.client)).passes(maps.ReasonPassOtherTraffic)
}

// establish confirms the flow.
func (c *conversation) establish(t *testing.T) {
	t.Helper()
	if c.masqueradedPort != 0 && !c.isTurned() {
		c.leaves(t, first(c.proto, c.place.client, c.backend))
		c.returns(t, answer(c.proto, c.backend, node))
	}
	c.hears(t, answer(c.proto, c.backend, c.place.client))
	c.says(t, second(c.proto, c.place.client, c.vip))
	if c.masqueradedPort != 0 {
		c.leaves(t, second(c.proto, c.place.client, c.backend))
	}
	if c.proto == layers.IPProtocolSCTP {
		c.agrees(t)
	}
}

// agrees makes the backend of an SCTP flow accept the client's cookie.
func (c *conversation) agrees(t *testing.T) {
	t.Helper()
	agreement := third(c.proto, client, client)
	if c.masqueradedPort != 0 {
		c.returns(t, agreement)
	}
	c.hears(t, agreement)
}

// answers returns the role of the entry whose packets leave for the client.
func (c *conversation) answers() uint8 {
	if c.isTurned() {
		return maps.FlowFromBackend
	}

	return maps.FlowToClient
}

// entryCount returns the number of entries of the flow.
func (c *conversation) entryCount() int {
	if c.masqueradedPort != 0 && !c.isTurned() {
		return 4
	}

	return 2
}

// eachConversation runs a test on flows of every protocol, plain and masqueraded.
func eachConversation(t *testing.T, run func(*testing.T, *conversation)) {
	t.Helper()
	for _, proto := range transports {
		for _, backend := range []struct{ name, at string }{{"plain", portPod}, {"masqueraded", remotePod}} {
			t.Run(fmt.Sprintf("%s %s", backend.name, proto), func(t *testing.T) {
				each(t, ways, func(t *testing.T, w *world, p place) {
					run(t, begin(t, w, p, proto, backend.at))
				})
			})
		}
	}
}

// An unconfirmed flow is in a table of its own. No entry gets lost when the flow moves to the other table.
func TestFlowsBeginHalfOpen(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		w, n := c.w, uint64(c.entryCount())
		w.holds(t, int(n), true)
		c.first(t, maps.ReasonFlow) // again
		w.holds(t, int(n), true)

		counts := w.counted(t, func() { c.establish(t) })
		w.holds(t, int(n), false)
		if counts.FlowsPut != n || counts.HalfOpenDeleted != n || counts.HalfOpenPut != 0 || counts.FlowsDeleted != 0 || counts.Repaired != 0 {
			t.Errorf("counted %+v, want %d moved", counts, n)
		}
	})
}

// Nor if some entries were lost before.
func TestLostEntriesAreMovedAsWell(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		if c.proto == layers.IPProtocolUDP {
			return // the answer confirms it
		}
		confirms, survivor := func() { c.says(t, second(c.proto, c.place.client, c.vip)) }, maps.FlowFromClient
		if c.masqueradedPort != 0 {
			c.leaves(t, first(c.proto, c.place.client, c.backend))
			c.returns(t, answer(c.proto, c.backend, node))
		}
		c.hears(t, answer(c.proto, c.backend, c.place.client))
		if c.proto == layers.IPProtocolSCTP {
			confirms, survivor = func() { c.hears(t, third(c.proto, client, client)) }, c.answers()
		}
		for _, e := range c.w.entries(t) {
			if e.flow.Role != survivor {
				c.w.delete(t, e)
			}
		}
		confirms()
		c.w.holds(t, c.entryCount(), false)
		c.hears(t, answer(c.proto, c.backend, c.place.client))
	})
}

// Each entry of a flow contains all of it.
func TestEntriesContainTheFlow(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		f := c.w.role(t, maps.FlowFromClient).flow
		for _, role := range f.Roles() {
			e := c.w.role(t, role).flow
			e.Role, e.State, e.LastSeen, e.Bytes, e.End, e.Ack = f.Role, f.State, f.LastSeen, f.Bytes, f.End, f.Ack
			if e != f {
				t.Errorf("entry of role %d is %+v, want %+v", role, e, f)
			}
		}
		created := f.Created
		f.Created, f.LastSeen, f.State, f.Role, f.BackendId, f.ServicePortId, f.Bytes, f.End, f.Ack = 0, 0, 0, 0, 0, 0, 0, 0, 0
		family := c.w.family
		want := maps.Flow{
			Client: c.w.mapAddr(c.place.client), ClientPort: maps.Port(40000), StackPort: maps.Port(40000),
			OriginalDst: c.w.mapAddr(c.vip), OriginalPort: maps.Port(80),
			Backend: c.w.mapAddr(c.backend), BackendPort: maps.Port(at(c.backend).Port()),
			Proto: uint8(c.proto), Flags: maps.FlowCounted | maps.FlowByUplinks,
		}
		if c.masqueradedPort != 0 {
			want.Masquerade, want.MasqueradePort = c.w.mapAddr(node), maps.Port(c.masqueradedPort)
			want.Flags |= maps.FlowMasqueraded | maps.FlowSent
		}
		if c.isTurned() {
			want.Flags |= maps.FlowTurned
		}
		if f != want {
			t.Errorf("%s: flow is %+v, want %+v", family, f, want)
		}
		if age := now(t) - created; age > 60e9 {
			t.Errorf("it was created %d ns ago", age)
		}
	})
}

// The packets that confirm a flow, and those that do not.
func TestConfirmation(t *testing.T) {
	say, hear := byClient, byBackend
	elsewhere := func(p packet) said { return said{packet: p, elsewhere: true} }
	tcpWith := func(flags string) packet { return tcp(client, client, flags) }
	sctpWith := func(chunk uint8) packet { return sctp(client, client, chunk) }
	data := udp(client, client)
	for _, test := range []struct {
		name      string
		proto     layers.IPProtocol
		said      []said
		confirmed bool
	}{
		{name: "not TCP's SYN+ACK", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S."))}},
		{name: "the client's ACK", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith("."))}, confirmed: true},
		{name: "one of what the backend has sent at once", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), hear(tcpWith("P.").with("hello")), say(tcpWith(".").acks(6))}, confirmed: true},
		{name: "one that follows data in the SYN", proto: layers.IPProtocolTCP, said: []said{say(tcpWith("S").with("hello")), hear(tcpWith("S.")), say(tcpWith("P.").with("hello"))}, confirmed: true},
		{name: "not one before the answer", proto: layers.IPProtocolTCP, said: []said{say(tcpWith("."))}},
		{name: "not one of something else", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith(".").acks(1 << 17))}},
		{name: "not a forged answer, and its ACK", proto: layers.IPProtocolTCP, said: []said{elsewhere(tcpWith("S.").numbered(1 << 20).acks(1 << 20)), say(tcpWith(".").acks(1<<20 + 1))}},
		{name: "not what the client accepts", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith("S."))}},
		{name: "the client's FIN", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith("F."))}, confirmed: true},
		{name: "not its RST", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith("R"))}},
		{name: "not its RST, and an ACK of something else", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith("R")), say(tcpWith(".").acks(1 << 17))}},
		{name: "not a later fragment", proto: layers.IPProtocolTCP, said: []said{hear(tcpWith("S.")), say(tcpWith(".").acks(1<<17).long(80).fragment(0, 40)), say(tcpWith(".").acks(1 << 17).long(80).rest(40))}},
		{name: "not a second datagram", proto: layers.IPProtocolUDP, said: []said{say(data), say(data)}},
		{name: "the answer to one", proto: layers.IPProtocolUDP, said: []said{hear(data)}, confirmed: true},
		{name: "not SCTP's INIT-ACK", proto: layers.IPProtocolSCTP, said: []said{hear(sctpWith(chunkInitAck))}},
		{name: "not its COOKIE-ECHO", proto: layers.IPProtocolSCTP, said: []said{hear(sctpWith(chunkInitAck)), say(sctpWith(chunkCookieEcho))}},
		{name: "its COOKIE-ACK", proto: layers.IPProtocolSCTP, said: []said{hear(sctpWith(chunkInitAck)), say(sctpWith(chunkCookieEcho)), hear(sctpWith(chunkCookieAck))}, confirmed: true},
		{name: "not one with another tag", proto: layers.IPProtocolSCTP, said: []said{hear(sctpWith(chunkInitAck)), say(sctpWith(chunkCookieEcho)), elsewhere(sctpWith(chunkCookieAck).bearing("else"))}},
		{name: "not an ABORT", proto: layers.IPProtocolSCTP, said: []said{hear(sctpWith(chunkAbort)), say(sctpWith(chunkAbort))}},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				c := begin(t, w, p, test.proto, portPod)
				for _, said := range test.said {
					switch {
					case said.client:
						c.says(t, said.packet)
					case said.elsewhere:
						c.sendsElsewhere(t, said.packet)
					default:
						c.hears(t, said.packet)
					}
				}
				w.holds(t, 2, !test.confirmed)
			})
		})
	}
}

// First packets from addresses that no host has, to a backend by way of the stack, let little other traffic pass the filter
// of sources, and hardly any once they are gone. What is theirs passes it.
func TestFloodOfSources(t *testing.T) {
	const flood, others = 5_000, 2_000
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		w.serve(t, service{at: []string{clusterIP}, to: []string{remotePod}})
		made := func(i int) string {
			return fmt.Sprintf("8.%d.%d.%d:%d", 128+i>>16, i>>8&0xff, i&0xff, 1024+i*7919%60_000)
		}
		for i := range flood {
			if o := w.ingress(t, p, tcp(made(i), clusterIP, "S")); o.reasons[maps.ReasonTranslated] != 1 {
				t.Fatalf("reasons are %v", o.reasons)
			}
		}
		passing := func() (percent int) {
			n := 0
			for i := range others {
				from, to := w.family.addrPort(at(made(1<<17+i*7))), w.family.addrPort(at(client))
				if w.maps.SourceFilter.May(maps.FlowKeyOf(maps.HookEgress, 6, from, to)) {
					n++
				}
			}

			return n * 100 / others
		}
		if has := passing(); has > 15 {
			t.Errorf("%d %% of other sources pass during the flood", has)
		}
		w.sweep(t, 20*time.Second)
		if has := passing(); has > 5 {
			t.Errorf("%d %% of other sources pass after it", has)
		}
		last := tcp(made(flood-1), clusterIP, "S")
		w.ingress(t, p, last).becomes(last.to(remotePod), maps.ReasonFlow)
		port := maps.Port(w.flowOf(t, made(flood-1), clusterIP).MasqueradePort)
		w.egress(t, uplink, last.to(remotePod)).becomes(last.to(remotePod).from(node).fromPort(port), maps.ReasonFlow)
	})
}

// A packet from the stack is only looked up if the filter reports that it may belong to a flow.
func TestSourceFilter(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		for _, e := range c.w.entries(t) {
			if e.key.Hook != maps.HookEgress {
				continue
			}
			other := e.key
			other.Src.Bytes[15]++
			if c.w.maps.SourceFilter.May(other) {
				t.Errorf("packets from %s are let through, whose neighbour has a flow", other.Source())
			}
		}
		c.w.emptySources()
		reply := second(c.proto, c.backend, client)
		if c.masqueradedPort == 0 {
			c.w.egress(t, uplink, reply).passes(maps.ReasonPassOtherTraffic)
		}
		// An entry that was lost is put back, and its packets pass the filter again.
		for _, e := range c.w.entries(t) {
			if e.key.Hook == maps.HookEgress {
				lab.Must(t, c.w.maps.Flows.Delete(e.key))
			}
		}
		c.w.wait(t, 10*time.Second)
		c.says(t, second(c.proto, client, clusterIP))
	})
}
