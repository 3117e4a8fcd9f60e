package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// use sets the number of entries of each kind in flows, as programs count them.
func (w *world) use(t testing.TB, connected, udp int) {
	t.Helper()
	for kind, entries := range map[uint32]int{maps.FlowsConnected: connected, maps.FlowsUDP: udp} {
		w.maps.FlowUsage.Add(kind, int64(entries)-w.maps.FlowUsage.Load(kind))
	}
}

// usage checks how many entries programs have counted in flows.
func (w *world) usage(t testing.TB, connected, udp int64) {
	t.Helper()
	if c, u := w.maps.FlowUsage.Load(maps.FlowsConnected), w.maps.FlowUsage.Load(maps.FlowsUDP); c != connected || u != udp {
		t.Errorf("%d entries of connections are counted, and %d of UDP, want %d and %d", c, u, connected, udp)
	}
}

func (w *world) room(t testing.TB) int {
	t.Helper()
	room, err := w.maps.FlowsRoom()
	lab.Must(t, err)

	return room
}

// Half of the room in flows is for connections, a quarter for UDP, and the rest for both.
func TestSharesOfFlows(t *testing.T) {
	w := newWorld(t, ipv4)
	room := w.room(t)
	for _, test := range []struct {
		name           string
		connected, udp int // entries
		admitsTCP      bool
		admitsUDP      bool
	}{
		{"none is there", 0, 0, true, true},
		{"connections have what is theirs", room / 2, 0, true, true},
		{"connections have all but what is for UDP", room - room/4, 0, false, true},
		{"the last place of connections", room - room/4 - 4, 0, true, true},
		{"UDP has all but what is for connections", 0, room - room/2, true, false},
		{"the last place of UDP", 0, room - room/2 - 4, true, true},
		{"UDP has more than what is for it", room / 2, room / 3, true, true},
		{"no place is left", room / 2, room - room/2, false, false},
		{"more than there are places", room, room, false, false},
		{"too few were counted", -10, -10, true, true},
	} {
		for proto, admitted := range map[layers.IPProtocol]bool{
			layers.IPProtocolTCP: test.admitsTCP, layers.IPProtocolSCTP: test.admitsTCP, layers.IPProtocolUDP: test.admitsUDP,
		} {
			t.Run(fmt.Sprintf("%s, for %s", test.name, proto), func(t *testing.T) {
				each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
					w.use(t, test.connected, test.udp)
					w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
					if !admitted && proto != layers.IPProtocolUDP {
						w.ingress(t, p, first(proto, p.client, clusterIP)).drops(maps.ReasonDropFlowTable)

						return
					}
					c := &conversation{w: w, place: p, proto: proto, vip: clusterIP, backend: portPod}
					c.first(t, maps.ReasonTranslated)
					c.establish(t)
					w.holds(t, 2, !admitted)
				})
			})
		}
	}
}

// A flow without room in flows works nevertheless, and moves there when there is room.
func TestFlowsWithoutRoom(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		w, n := c.w, c.entryCount()
		w.use(t, w.room(t), w.room(t))
		c.establish(t)
		w.holds(t, n, true)
		if c.proto == layers.IPProtocolTCP {
			c.says(t, segment("P.").long(1000))
			c.hears(t, segment("P.").acks(1001).long(1000))
			const later = 1001 + 1<<20
			c.says(t, segment("P.").numbered(1001).acks(later).long(1000))
			if ack := w.role(t, maps.FlowFromClient).flow.Ack; ack-firstNumber != later {
				t.Errorf("the client has acknowledged byte %d, want %d", ack-firstNumber, later)
			}
			c.first(t, maps.ReasonFlow)
		}
		if c.proto != layers.IPProtocolUDP {
			w.sweep(t, 23*time.Hour)
		}
		w.holds(t, n, true)
		w.use(t, 0, 0)
		c.says(t, second(c.proto, c.place.client, c.vip))
		c.hears(t, third(c.proto, c.backend, c.place.client))
		w.holds(t, n, false)
	})
}

// A flow that was turned around has no room in flows for what it needs to pass the stack: it works nevertheless, and gets
// that when there is room. So it is with an entry that was lost.
func TestTurnedFlowsWithoutRoom(t *testing.T) {
	for _, proto := range transports {
		each(t, []place{turning}, func(t *testing.T, w *world, p place) {
			c := begin(t, w, p, proto, remotePod)
			c.establish(t)
			w.use(t, w.room(t), w.room(t))
			where := func(inFlows int) {
				t.Helper()
				have := 0
				for _, e := range w.entries(t) {
					if !e.halfOpen {
						have++
					}
				}
				if n := len(w.entries(t)); n != 4 || have != inFlows {
					t.Errorf("%d entries, and %d of them in flows, want 4 and %d", n, have, inFlows)
				}
			}
			exchange := func() {
				c.says(t, second(proto, client, clusterIP))
				c.leaves(t, second(proto, client, clusterIP))
				c.returns(t, third(proto, remotePod, node))
				c.hears(t, third(proto, remotePod, node))
			}
			w.turn(t)
			defer w.turn(t, "eth0", "eth1")
			w.turns = false
			exchange()
			where(2)
			w.wait(t, 1100*time.Millisecond)
			exchange()
			where(2)
			w.delete(t, w.role(t, maps.FlowFromBackend))
			w.wait(t, 1100*time.Millisecond)
			exchange()
			where(1)
			w.delete(t, w.role(t, maps.FlowToBackend))
			w.delete(t, w.role(t, maps.FlowToClient))
			w.wait(t, 1100*time.Millisecond)
			exchange()
			where(1)
			w.use(t, 0, 0)
			w.wait(t, 1100*time.Millisecond)
			exchange()
			where(4)
		})
	}
}

// Entries of flows are counted when they are put and deleted, by programs and by the agent.
func TestUsageOfFlows(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		w, n := c.w, int64(c.entryCount())
		usage := func(n int64) {
			t.Helper()
			if c.proto == layers.IPProtocolUDP {
				w.usage(t, 0, n)
			} else {
				w.usage(t, n, 0)
			}
		}
		usage(0)
		c.establish(t)
		usage(n)
		w.sweep(t, 0)
		usage(n)
		w.delete(t, w.role(t, c.answers())) // as the kernel does, without counting it
		w.wait(t, 1100*time.Millisecond)
		c.says(t, second(c.proto, c.place.client, c.vip))
		w.sweep(t, 0)
		usage(n)
		w.sweep(t, 100*time.Hour)
		usage(0)
	})
}

// If connections have no room, those that have ended are deleted, and no others.
func TestEndedConnectionsMakeRoom(t *testing.T) {
	eachConversation(t, func(t *testing.T, c *conversation) {
		if c.proto == layers.IPProtocolUDP {
			return
		}
		w, in := c.w, first(c.proto, stranger, c.vip)
		limit := w.room(t) - w.room(t)/4
		c.establish(t)
		old := w.role(t, maps.FlowFromClient).flow
		w.use(t, limit, 0)
		w.ingress(t, c.place, in).drops(maps.ReasonDropFlowTable)

		if c.proto == layers.IPProtocolTCP {
			c.says(t, segment("R"))
			c.says(t, segment(".")) // it goes on
			w.ingress(t, c.place, in).drops(maps.ReasonDropFlowTable)
			c.says(t, segment("R"))
		} else {
			c.says(t, sctp(client, client, chunkAbort))
		}
		w.use(t, limit+c.entryCount()-4, 0)
		goesOn := &conversation{w: w, place: c.place, proto: c.proto, vip: c.vip, backend: c.backend, masqueradedPort: c.masqueradedPort}
		goesOn.place.client = stranger
		goesOn.first(t, maps.ReasonTranslated)
		w.usage(t, int64(limit)-4, 0)
		for _, e := range w.entries(t) {
			if e.flow.Created == old.Created {
				t.Errorf("an entry is left of the connection that has ended: %+v", e)
			}
		}
	})
}

// A flood of datagrams only evicts datagrams, and a flood of connections only connections.
func TestHalfOpenFlowsHaveATableOfTheirOwn(t *testing.T) {
	each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
		for _, proto := range transports {
			w.serve(t, service{at: []string{clusterIP}, proto: proto, to: []string{portPod}})
			w.ingress(t, p, first(proto, p.client, clusterIP)).becomes(first(proto, p.client, portPod), maps.ReasonTranslated)
		}
		counts := make(map[bool]int) // by whether it is UDP's
		for _, e := range w.entries(t) {
			udp := e.flow.Proto == uint8(layers.IPProtocolUDP)
			opening := w.maps.HalfOpen
			if udp {
				opening = w.maps.Unanswered
			}
			if _, ok, err := opening.Lookup(e.key); !ok || err != nil {
				t.Errorf("entry %+v is in another table (%v)", e, err)
			}
			counts[udp]++
		}
		if counts[true] != 2 || counts[false] != 4 {
			t.Errorf("%d entries are UDP's, and %d connections', want 2 and 4", counts[true], counts[false])
		}
	})
}
