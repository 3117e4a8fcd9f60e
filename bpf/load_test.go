package bpf

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/test/lab"
)

// live returns the number of flows of the backend of a conversation.
func (c *conversation) live(t testing.TB) int {
	t.Helper()
	f := c.w.flowOf(t, c.place.client, c.vip)

	return int(c.w.maps.Loads.Load(f.BackendId).Flows)
}

// A flow is in its backend's load until both sides have ended, and again if one of them continues.
func TestLoadOfFlows(t *testing.T) {
	tcpWith := func(flags string) packet { return tcp(stranger, stranger, flags) }
	sctpWith := func(chunk uint8) packet { return sctp(stranger, stranger, chunk) }
	type said struct {
		client bool
		packet packet
		live   int // afterwards
	}
	for _, test := range []struct {
		name  string
		proto layers.IPProtocol
		said  []said
	}{
		{"refused", layers.IPProtocolTCP, []said{{false, tcpWith("R."), 0}, {false, tcpWith("R."), 0}}},
		{"closed by the client first", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("F."), 1}, {false, tcpWith(".").acks(2), 1},
			{false, tcpWith("F.").acks(2), 1}, {true, tcpWith(".").numbered(2).acks(2), 0}, {false, tcpWith("F.").acks(2), 0}, {true, tcpWith("F.").acks(2), 0},
		}},
		{"closed by the backend first", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {false, tcpWith("F."), 1}, {true, tcpWith("P.").acks(2), 1},
			{true, tcpWith("F.").acks(2), 1}, {false, tcpWith(".").numbered(2).acks(2), 0},
		}},
		{"closed before it was confirmed", layers.IPProtocolTCP, []said{{false, tcpWith("S."), 1}, {false, tcpWith("F."), 1}, {true, tcpWith("F.").acks(2), 1}, {false, tcpWith(".").numbered(2).acks(2), 0}}},
		{"closed by forged FINs", layers.IPProtocolTCP, []said{{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("F.").numbered(70), 1}, {false, tcpWith("F.").numbered(80), 1}}},
		{"reset by the client", layers.IPProtocolTCP, []said{{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("R"), 0}, {true, tcpWith("R"), 0}}},
		{"reset by the backend", layers.IPProtocolTCP, []said{{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {false, tcpWith("R."), 0}}},
		{"reset after one side had closed", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("F."), 1}, {false, tcpWith("R."), 0},
		}},
		{"reset by a segment with an invalid number", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("R"), 0}, {true, tcpWith("P."), 1}, {true, tcpWith("P."), 1},
		}},
		{"reset by the client, that had sent more, and accepted anew", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {true, tcpWith("P.").with("hello"), 1}, {true, tcpWith("R.").numbered(6), 0},
			{true, tcpWith("S").numbered(1 << 29), 0}, {false, tcpWith("S.").numbered(1 << 30).acks(1<<29 + 1), 0}, {true, tcpWith(".").numbered(1<<29 + 1).acks(1<<30 + 1), 1},
		}},
		{"reset by the backend, that had sent more, and accepted anew", layers.IPProtocolTCP, []said{
			{false, tcpWith("S."), 1}, {true, tcpWith("."), 1}, {false, tcpWith("P.").with("hello"), 1}, {false, tcpWith("R.").numbered(6), 0},
			{true, tcpWith("S").numbered(1 << 29), 0}, {false, tcpWith("S.").numbered(1 << 30).acks(1<<29 + 1), 1}, {true, tcpWith(".").numbered(1<<29 + 1).acks(1<<30 + 1), 1},
		}},
		{"shut down by both", layers.IPProtocolSCTP, []said{
			{false, sctpWith(chunkInitAck), 1}, {true, sctpWith(chunkCookieEcho), 1}, {true, sctpWith(chunkShutdown), 1}, {false, sctpWith(chunkShutdown), 0},
		}},
		{"aborted", layers.IPProtocolSCTP, []said{{false, sctpWith(chunkInitAck), 1}, {true, sctpWith(chunkCookieEcho), 1}, {false, sctpWith(chunkAbort), 0}}},
		{"datagrams", layers.IPProtocolUDP, []said{
			{true, udp(stranger, stranger), 1}, {false, udp(stranger, stranger), 1}, {true, udp(stranger, stranger), 1},
		}},
	} {
		for _, backend := range []string{portPod, remotePod} { // the second is masqueraded
			t.Run(fmt.Sprintf("%s, to %s", test.name, backend), func(t *testing.T) {
				each(t, []place{uplink, podVeth, turning}, func(t *testing.T, w *world, p place) {
					c := begin(t, w, p, test.proto, backend)
					if live := c.live(t); live != 1 {
						t.Fatalf("after the first packet there are %d connections", live)
					}
					c.first(t, maps.ReasonFlow) // again
					for i, said := range test.said {
						if said.client {
							c.says(t, said.packet)
						} else {
							c.hears(t, said.packet)
						}
						if live := c.live(t); live != said.live {
							t.Fatalf("after packet %d there are %d connections, want %d", i+1, live, said.live)
						}
					}
				})
			})
		}
	}
}

// A client that reuses its port has one connection, to the new backend.
func TestLoadOfReplacedFlows(t *testing.T) {
	for _, test := range []struct {
		name string
		ends func(c *conversation, t *testing.T)
	}{
		{"closed", func(c *conversation, t *testing.T) {
			c.establishFrom(t)
			c.closes(t)
		}},
		{"reset", func(c *conversation, t *testing.T) {
			c.establishFrom(t)
			c.says(t, tcp(client, client, "R"))
		}},
		{"refused", func(c *conversation, t *testing.T) { c.hears(t, tcp(client, client, "R.")) }},
		{"of a backend that is gone", func(c *conversation, t *testing.T) {
			c.establishFrom(t)
			lab.Must(t, c.w.hand.RemoveBackend(c.w.flowOf(t, c.place.client, c.vip).BackendId))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			each(t, []place{uplink, podVeth, turning}, func(t *testing.T, w *world, p place) {
				old := w.serve(t, service{at: []string{clusterIP}, to: []string{portPodToo}})
				c := &conversation{w: w, place: p, proto: layers.IPProtocolTCP, vip: clusterIP, backend: portPodToo}
				c.first(t, maps.ReasonTranslated)
				test.ends(c, t)
				next := w.serve(t, service{at: []string{clusterIP}, to: []string{tapPod}})
				c.backend = tapPod
				for range 3 {
					w.ingress(t, p, tcp(p.client, clusterIP, "S"))
					if was, is := w.load(old, portPodToo), w.load(next, tapPod); was != 0 || is != 1 {
						t.Errorf("the backends have %d and %d connections, want 0 and 1", was, is)
					}
				}
			})
		})
	}
}

// Packets that are not translated do not count as load.
func TestLoadOfFailures(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{clusterIP}, to: []string{nowhere}})
		w.ingress(t, p, tcp(p.client, clusterIP, "S")).drops(maps.ReasonDropMasqueradeAddr)
		if live := w.load(s, nowhere); live != 0 {
			t.Errorf("%d connections, want none", live)
		}
		w.holds(t, 0, false)
	})
}

// sweep runs the agent's sweep over all flows after this time.
func (w *world) sweep(t testing.TB, later time.Duration) *flow.Sweeper {
	t.Helper()
	s, err := flow.New(flow.Config{Maps: w.maps, Now: func() uint64 { return maps.Now() + uint64(later) }})
	lab.Must(t, err)
	_, err = s.Sweep()
	lab.Must(t, err)

	return s
}

// Flows that the agent has ended do not count as load, nor do evicted ones after a sweep. They count again
// when they come back.
func TestLoadOfSweptFlows(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		c.establish(t)
		backend := c.w.flowOf(t, c.place.client, c.vip).BackendId
		mustLoad := func(want int32, when string) {
			t.Helper()
			if have := c.w.maps.Loads.Load(backend).Flows; have != want {
				t.Fatalf("%s, there are %d connections, want %d", when, have, want)
			}
		}
		c.w.sweep(t, 0)
		mustLoad(1, "after a sweep")
		pushed := c.w.role(t, maps.FlowFromClient)
		c.w.delete(t, pushed)
		c.w.sweep(t, 0)
		mustLoad(0, "without the client's entry")
		c.w.wait(t, 1100*time.Millisecond)
		c.hears(t, answer(c.proto, c.backend, c.place.client)) // puts it back
		c.w.sweep(t, 0)
		mustLoad(1, "with the client's entry again")
		for _, e := range c.w.entries(t) {
			c.w.delete(t, e)
		}
		c.w.sweep(t, 0)
		mustLoad(0, "without any entry")
		c.first(t, maps.ReasonTranslated)
		mustLoad(1, "begun anew")
		c.w.sweep(t, 100*time.Hour)
		mustLoad(0, "idle for long")
		c.w.holds(t, 0, false)
	})
}

// counts returns the counts of a service port, including those that are still in entries.
func (c *conversation) counts(t testing.TB) (sent, received uint64, whys map[maps.Reason]uint64) {
	t.Helper()
	whys = make(map[maps.Reason]uint64)
	for e, err := range c.w.maps.Stats.All() {
		lab.Must(t, err)
		switch e.Key.What {
		case maps.StatBytesSent:
			sent += e.Value
		case maps.StatBytesReceived:
			received += e.Value
		default:
			whys[maps.Reason(e.Key.What)] += e.Value
		}
	}
	for _, e := range c.w.entries(t) {
		switch {
		case e.flow.Role == maps.FlowFromClient:
			sent += e.flow.Bytes
		case e.flow.Role == maps.FlowToClient, e.flow.IsTurned():
			received += e.flow.Bytes
		default:
			if e.flow.Bytes != 0 {
				t.Errorf("an entry of role %d has %d bytes: they count twice", e.flow.Role, e.flow.Bytes)
			}
		}
	}

	return sent, received, whys
}

// At any time, every byte of IP is counted exactly once: in the counts, in an entry, or by the agent that
// ended the flow.
func TestBytesOfFlows(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		f := c.w.family
		said := uint64(len(first(c.proto, c.place.client, c.vip).network(f)))
		var heard uint64
		check := func(when string) {
			t.Helper()
			if sent, received, _ := c.counts(t); sent != said || received != heard {
				t.Fatalf("%s: %d bytes sent and %d received, want %d and %d", when, sent, received, said, heard)
			}
		}
		says := func(in packet) {
			said += uint64(len(in.from(c.place.client).to(c.vip).network(f)))
			c.says(t, in)
		}
		hears := func(in packet) {
			heard += uint64(len(in.from(c.backend).to(c.place.client).network(f)))
			c.hears(t, in)
		}
		check("after the first packet")
		if c.masqueradedPort != 0 && !c.isTurned() {
			c.leaves(t, first(c.proto, c.place.client, c.backend))
			c.returns(t, answer(c.proto, c.backend, node))
		}
		hears(answer(c.proto, c.backend, c.place.client))
		check("after its answer")
		says(second(c.proto, c.place.client, c.vip))
		check("once it is open")
		says(second(c.proto, c.place.client, c.vip).padded(10))
		check("with an Ethernet frame that was filled up")
		for i := range 5 {
			c.w.wait(t, time.Duration(i%2)*1100*time.Millisecond)
			says(second(c.proto, c.place.client, c.vip).with("some bytes"))
			hears(answer(c.proto, c.backend, c.place.client))
			check("while it is open")
			if c.masqueradedPort != 0 && !c.isTurned() {
				c.leaves(t, second(c.proto, c.place.client, c.backend).with("some bytes"))
				c.returns(t, answer(c.proto, c.backend, node))
				check("on its way to the backend")
			}
		}
		ended := c.w.sweep(t, 100*time.Hour).Bytes()
		sent, received, whys := c.counts(t)
		for _, b := range ended {
			sent, received = sent+b.Sent, received+b.Received
		}
		if sent != said || received != heard || len(ended) != 1 {
			t.Errorf("after its end: %d bytes sent and %d received, %v of them by the agent, want %d and %d", sent, received, ended, said, heard)
		}
		if whys[maps.ReasonTranslated] != 1 || len(whys) != 1 {
			t.Errorf("new flows: %v, want one that was translated", whys)
		}
	})
}

// The outcome of new flows is counted for their frontend.
func TestStatsOfNewFlows(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		counts := func(s published) map[uint32]uint64 {
			have := make(map[uint32]uint64)
			for e, err := range w.maps.Stats.All() {
				lab.Must(t, err)
				if e.Key.ServicePortId == s.id && e.Key.What < maps.StatBytesSent {
					have[e.Key.What] = e.Value
				}
			}

			return have
		}
		for i, test := range []struct {
			service service
			want    maps.Reason
		}{
			{service{to: []string{tapPod}}, maps.ReasonTranslated},
			{service{}, maps.ReasonRejectNoBackend},
			{service{flags: maps.PoolDropIfEmpty}, maps.ReasonDropNoLocalBackend},
			{service{to: []string{tapPod}, ranges: []string{"203.0.113.0/24"}}, maps.ReasonDropSourceRange},
			{service{to: []string{nowhere}}, maps.ReasonDropMasqueradeAddr},
		} {
			test.service.at = []string{fmt.Sprintf("8.0.97.%d:80", i+1)}
			test.service.kind = maps.KindExternalIP
			s := w.serve(t, test.service)
			w.unsummed = true // a refusal has no sum
			for n := range 3 {
				w.ingress(t, p, tcp(p.client, test.service.at[0], "S").fromPort(uint16(100+n)))
			}
			if have := counts(s); len(have) != 1 || have[uint32(test.want)] != 3 {
				t.Errorf("%s: %v is counted, want 3 times %s", test.service.at[0], have, test.want)
			}
		}
	})
}

// One Service fills the map of refusals. Those of another one are counted for all then.
func TestRefusalsWithoutRoom(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		s := w.serve(t, service{at: []string{"8.0.97.9:80"}, kind: maps.KindExternalIP})
		w.unsummed = true // a refusal has no sum
		refusals := w.maps.Replacements()["sl_refusals"]
		count := func(port uint32) (n uint64) {
			err := refusals.Lookup(maps.RefusalKey{ServicePortId: port, Reason: uint32(maps.ReasonRejectNoBackend)}, &n)
			if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				t.Fatal(err)
			}

			return n
		}
		all := maps.RefusalKey{ServicePortId: maps.AllServicePorts, Reason: uint32(maps.ReasonRejectNoBackend)}
		lab.Must(t, refusals.Put(all, uint64(4))) // each world begins with an empty map
		var others []maps.RefusalKey
		for port := uint32(1 << 20); ; port++ {
			other := maps.RefusalKey{ServicePortId: port, Reason: uint32(maps.ReasonRejectNoBackend)}
			err := refusals.Put(other, uint64(1))
			if errors.Is(err, unix.E2BIG) {
				break
			}
			lab.Must(t, err)
			others = append(others, other)
		}
		defer func() {
			for _, other := range others {
				lab.Must(t, refusals.Delete(other))
			}
		}()
		for range 3 {
			w.refused(t, p, tcp(p.client, "8.0.97.9:80", "S")).ends(verdictRedirect, maps.ReasonRejectNoBackend)
		}
		if own, all := count(s.id), count(maps.AllServicePorts); own != 0 || all != 7 {
			t.Errorf("%d refusals are counted for the Service and %d for all, want none and 7", own, all)
		}
	})
}
