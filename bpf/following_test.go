package bpf

import (
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Each entry puts back the others after an eviction; not at every packet, but once a second.
func TestEntriesPutBackEachOther(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		pass := map[uint8]func(){
			maps.FlowFromClient:  func() { c.says(t, second(c.proto, client, clusterIP)) },
			maps.FlowToClient:    func() { c.hears(t, answer(c.proto, portPod, client)) },
			maps.FlowToBackend:   func() { c.leaves(t, second(c.proto, client, clusterIP)) },
			maps.FlowFromBackend: func() { c.returns(t, answer(c.proto, portPod, client)) },
		}
		n := c.entryCount()
		for _, survivor := range c.w.role(t, maps.FlowFromClient).flow.Roles() {
			for _, e := range c.w.entries(t) {
				if e.flow.Role != survivor {
					c.w.delete(t, e)
				}
			}
			pass[survivor]()
			c.w.holds(t, 1, false)

			c.w.wait(t, 1100*time.Millisecond)
			counts := c.w.counted(t, pass[survivor])
			c.w.holds(t, n, false)
			if counts.Repaired != uint64(n-1) || counts.FlowsPut != uint64(n-1) {
				t.Errorf("counted %+v, want %d repaired", counts, n-1)
			}
			for role := range pass {
				if n == 4 || role == maps.FlowFromClient || role == maps.FlowToClient {
					pass[role]()
				}
			}
		}
	})
}

// The kernel gives the memory of a deleted entry to another flow, even while a program reads it: the packet
// does not become one of that flow.
func TestEntryOfAnotherFlow(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		e := c.w.role(t, maps.FlowFromClient)
		e.key.SrcPort = maps.Port(maps.Port(e.key.SrcPort) + 1)
		lab.Must(t, c.w.maps.Flows.Put(e.key, e.flow))
		in := second(c.proto, client, clusterIP)
		in = in.fromPort(in.src.Port() + 1)
		want := maps.ReasonRejectNoFlow
		if c.proto == layers.IPProtocolUDP {
			want = maps.ReasonTranslated // it opens a flow
		}
		if o := c.w.refused(t, c.place, in); o.reasons[want] != 1 || len(o.reasons) != 1 {
			t.Errorf("reasons are %v, want %q", o.reasons, want)
		}
	})
}

// An entry contains the time of its last packet, to the second.
func TestRefresh(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		seen := c.w.role(t, maps.FlowFromClient).flow.LastSeen
		c.says(t, second(c.proto, client, clusterIP))
		if again := c.w.role(t, maps.FlowFromClient).flow.LastSeen; again != seen {
			t.Errorf("it was written again after %d ns", again-seen)
		}

		c.w.wait(t, 10*time.Second)
		c.says(t, second(c.proto, client, clusterIP))
		if idle := now(t) - c.w.role(t, maps.FlowFromClient).flow.LastSeen; idle > 5e9 {
			t.Errorf("it was last seen %d ns ago", idle)
		}
	})
}

// heard is a packet, and the states after it: of the client's side and of the backend's.
type heard struct {
	client    bool
	packet    packet
	states    [2]uint8
	elsewhere bool // the backend sends it on another connection
}

// The end of a flow is recorded for the side that has ended.
func TestStates(t *testing.T) {
	const (
		isNew, open, fin, reset = maps.FlowNew, maps.FlowOpen, maps.FlowFin, maps.FlowReset
	)
	say := func(p packet, from, to uint8) heard {
		return heard{client: true, packet: p, states: [2]uint8{from, to}}
	}
	hear := func(p packet, from, to uint8) heard { return heard{packet: p, states: [2]uint8{from, to}} }
	elsewhere := func(p packet, from, to uint8) heard {
		return heard{packet: p, states: [2]uint8{from, to}, elsewhere: true}
	}
	tcpWith := func(flags string) packet { return tcp(client, client, flags) }
	sctpWith := func(chunk uint8) packet { return sctp(client, client, chunk) }

	for _, test := range []struct {
		name  string
		proto layers.IPProtocol
		heard []heard
	}{
		{"TCP, closed by both", layers.IPProtocolTCP, []heard{
			say(tcpWith("S"), isNew, isNew), hear(tcpWith("S."), isNew, open), say(tcpWith("."), open, open),
			say(tcpWith("F."), open, open), hear(tcpWith("."), open, open), hear(tcpWith(".").acks(2), fin, open),
			hear(tcpWith("F.").acks(2), fin, open), say(tcpWith(".").numbered(2).acks(2), fin, fin),
		}},
		{"TCP, reset by the client", layers.IPProtocolTCP, []heard{
			hear(tcpWith("S."), isNew, open), say(tcpWith("."), open, open), say(tcpWith("R"), reset, open), hear(tcpWith("."), reset, open),
		}},
		{"TCP, reset by the backend after the client's FIN", layers.IPProtocolTCP, []heard{
			hear(tcpWith("S."), isNew, open), say(tcpWith("."), open, open), say(tcpWith("F."), open, open), hear(tcpWith(".").acks(2), fin, open), hear(tcpWith("R.").acks(2), fin, reset),
		}},
		{"TCP, closed by the client before it said anything else", layers.IPProtocolTCP, []heard{
			hear(tcpWith("S."), isNew, open), say(tcpWith("F."), open, open), hear(tcpWith("F.").acks(2), fin, open), say(tcpWith(".").numbered(2).acks(2), fin, fin),
		}},
		{"TCP, closed by the backend before the client said anything", layers.IPProtocolTCP, []heard{
			hear(tcpWith("S."), isNew, open), hear(tcpWith("F."), isNew, open), say(tcpWith(".").acks(2), open, fin),
		}},
		{"TCP, refused", layers.IPProtocolTCP, []heard{hear(tcpWith("R."), isNew, reset)}},
		{"TCP, forged, before the answer", layers.IPProtocolTCP, []heard{
			say(tcpWith("."), isNew, isNew), say(tcpWith("S."), isNew, isNew), say(tcpWith("R"), isNew, isNew), hear(tcpWith("."), isNew, isNew), hear(tcpWith("F."), isNew, isNew),
			elsewhere(tcpWith("S.").acks(1<<20), isNew, isNew), hear(tcpWith("S."), isNew, open), say(tcpWith(".").acks(1<<20), isNew, open), say(tcpWith("."), open, open),
		}},
		{"TCP, forged", layers.IPProtocolTCP, []heard{
			hear(tcpWith("S."), isNew, open), say(tcpWith("."), open, open), say(tcpWith("F.").numbered(9), open, open), hear(tcpWith("F.").numbered(9), open, open),
			say(tcpWith("R").numbered(5), open, open), hear(tcpWith("R").numbered(5), open, open), say(tcpWith("S."), open, open), hear(tcpWith("S.").numbered(7), open, open),
		}},
		{"TCP, FIN after RST", layers.IPProtocolTCP, []heard{hear(tcpWith("S."), isNew, open), say(tcpWith("."), open, open), say(tcpWith("R"), reset, open), say(tcpWith("F."), reset, open)}},
		{"SCTP, shut down", layers.IPProtocolSCTP, []heard{
			hear(sctpWith(chunkInitAck), isNew, open), say(sctpWith(chunkCookieEcho), open, open), hear(sctpWith(chunkCookieAck), open, open),
			say(sctpWith(chunkData), open, open), say(sctpWith(chunkShutdown), fin, open), hear(sctpWith(chunkShutdownAck), fin, fin), say(sctpWith(chunkShutdownDone), fin, fin),
		}},
		{"SCTP, forged", layers.IPProtocolSCTP, []heard{
			elsewhere(sctpWith(chunkInitAck).bearing("else"), isNew, isNew), hear(sctpWith(chunkInitAck), isNew, open),
			say(sctpWith(chunkCookieEcho).bearing("else"), isNew, open), say(sctpWith(chunkShutdown).bearing("else"), isNew, open), say(sctpWith(chunkCookieEcho), open, open),
			say(sctpWith(chunkAbort).bearing("else"), open, open), say(sctpWith(chunkAbort).reflecting("else"), open, open), elsewhere(sctpWith(chunkShutdownAck).bearing("else"), open, open),
		}},
		{"SCTP, aborted by a side that does not know of it", layers.IPProtocolSCTP, []heard{
			hear(sctpWith(chunkInitAck).with("backend!"), isNew, open), say(sctpWith(chunkCookieEcho).bearing("backend!"), open, open), hear(sctpWith(chunkAbort).reflecting("backend!"), open, reset),
		}},
		{"SCTP, aborted", layers.IPProtocolSCTP, []heard{hear(sctpWith(chunkInitAck), isNew, open), say(sctpWith(chunkCookieEcho), open, open), hear(sctpWith(chunkAbort), open, reset)}},
		{"UDP", layers.IPProtocolUDP, []heard{hear(udp(client, client), open, open), say(udp(client, client), open, open)}},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				listen(t, begin(t, w, p, test.proto, portPod), test.heard)
			})
		})
	}
}

// listen continues a conversation and checks the states after each packet.
func listen(t *testing.T, c *conversation, all []heard) {
	t.Helper()
	for i, heard := range all {
		switch {
		case heard.client:
			c.says(t, heard.packet)
		case heard.elsewhere:
			c.sendsElsewhere(t, heard.packet)
		default:
			c.hears(t, heard.packet)
		}
		have := [2]uint8{c.w.role(t, maps.FlowFromClient).flow.State, c.w.role(t, maps.FlowToClient).flow.State}
		if have != heard.states {
			t.Errorf("after packet %d the states are %v, want %v", i+1, have, heard.states)
		}
	}
}
