package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// allAlgorithms are the algorithms that a frontend can have.
var allAlgorithms = []uint8{
	maps.AlgorithmRandom, maps.AlgorithmRR, maps.AlgorithmLC, maps.AlgorithmSED,
	maps.AlgorithmNQ, maps.AlgorithmSH, maps.AlgorithmDH, maps.AlgorithmMaglev,
}

// way is a way in which a client begins a flow.
type way struct {
	name        string
	network     string
	unconnected bool
}

var ways = []way{
	{"TCP", "tcp4", false}, {"TCP over IPv6", "tcp6", false},
	{"connected UDP", "udp4", false}, {"connected UDP over IPv6", "udp6", false},
	{"datagrams", "udp4", true}, {"datagrams over IPv6", "udp6", true},
}

// balanced is a service that any way can dial.
type balanced struct {
	*service
	w   *world
	way way
}

// balance publishes a service of the colours for one way to dial it, with several
// addresses, which no other has: a client that gets a port again would have the flow that it had at the address.
func (w *world) balance(t testing.TB, way way, algorithm uint8, affinity uint32) balanced {
	t.Helper()
	s := service{
		proto: way.network[:3], algorithm: algorithm, affinity: affinity, to: w.all4(),
	}
	format := "10.96.%d.%d:80"
	if strings.HasSuffix(way.network, "6") {
		format, s.to = "[fd00:96::%x:%x]:80", w.all6()
	}
	for i := range 3 {
		s.at = append(s.at, fmt.Sprintf(format, w.balanced, i+1))
	}
	w.balanced++

	return balanced{w.add(t, s), w, way}
}

// ask has a client begin a flow, and returns which backend answers.
func (b balanced) ask(t testing.TB, client *lab.Caller, at string) uint32 {
	t.Helper()
	reply, err := client.Exchange(lab.Exchange{Network: b.way.network, Address: at, Unconnected: b.way.unconnected})
	lab.Must(t, err)
	i := slices.Index(b.to, mustAnswer(t, reply.Text).Local.String())
	if i < 0 {
		t.Fatalf("%s is no backend", reply.Text)
	}

	return b.backends[i]
}

// load is the load of a backend.
func (w *world) load(id uint32) int { return w.Maps().Loads.Load(id).Live() }

// busy opens as many connections to each backend of a service as loads has, and waits
// until these are all of them.
func (w *world) busy(t testing.TB, s *service, loads ...int) {
	t.Helper()
	for i, load := range loads {
		w.Maps().Loads.AddFlows(s.backends[i], int32(load))
	}
	w.mustRest(t, s, loads...)
}

// mustRest waits until the backends of a service have these loads.
func (w *world) mustRest(t testing.TB, s *service, loads ...int) {
	t.Helper()
	var have []int
	lab.Eventually(t, fmt.Sprintf("loads of %d", loads), func() bool {
		have = have[:0]
		for _, id := range s.backends[:len(loads)] {
			have = append(have, w.load(id))
		}

		return slices.Equal(have, loads)
	})
}

// Each algorithm chooses the backend of a new flow, in whichever way the flow begins.
func TestAlgorithms(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			t.Run("by rr, one after the other", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmRR, 0)
				if strings.HasPrefix(way.network, "udp") && !way.unconnected {
					b.testRounds(t, client)

					return
				}
				before := b.ask(t, client, b.at[0])
				for range 7 {
					now := b.ask(t, client, b.at[0])
					if want := b.backends[(slices.Index(b.backends, before)+1)%3]; now != want {
						t.Fatalf("backend %d after %d, want %d", now, before, want)
					}
					before = now
				}
			})
			t.Run("by lc, never the busiest", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmLC, 0)
				w.busy(t, b.service, 20, 40, 0)
				seen := map[uint32]int{}
				for range 30 {
					seen[b.ask(t, client, b.at[0])]++
				}
				if seen[b.backends[1]] > 0 || seen[b.backends[0]] == 0 || seen[b.backends[2]] == 0 {
					t.Errorf("with 20, 40 and 0 connections, they got %v more", seen)
				}
			})
			t.Run("by sed, the least busy", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmSED, 0)
				w.busy(t, b.service, 30, 31, 10)
				for range 8 {
					if got := b.ask(t, client, b.at[0]); got != b.backends[2] {
						t.Fatalf("with 30, 31 and 10 connections, backend %d got one more", got)
					}
				}
			})
			t.Run("by nq, an idle one", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmNQ, 0)
				w.busy(t, b.service, 1, 0, 2)
				for range 8 {
					if got := b.ask(t, client, b.at[0]); got != b.backends[1] {
						t.Fatalf("with 1, 0 and 2 connections, backend %d got one more", got)
					}
					w.mustRest(t, b.service, 1, 0, 2)
				}
			})
			t.Run("by nq, the least busy if none is idle", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmNQ, 0)
				w.busy(t, b.service, 41, 60, 20)
				for range 8 {
					if got := b.ask(t, client, b.at[0]); got != b.backends[2] {
						t.Fatalf("with 41, 60 and 20 connections, backend %d got one more", got)
					}
				}
			})
			t.Run("by sh, that of the client", func(t *testing.T) { w.testSourceHash(t, way, client) })
			t.Run("by dh, that of the address", func(t *testing.T) { w.testDestinationHash(t, way, client) })
			t.Run("by maglev, each its share", func(t *testing.T) {
				b := w.balance(t, way, maps.AlgorithmMaglev, 0)
				seen := map[uint32]int{}
				for range 60 {
					seen[b.ask(t, client, b.at[0])]++
				}
				for _, id := range b.backends { // 20 each; fewer than 4 come once in a million times
					if seen[id] < 4 {
						t.Errorf("of 60 flows, they got %v", seen)
					}
				}
			})
		})
	}
}

// testRounds tests that each backend has one turn in each round of connect() of UDP sockets, which need not
// begin with the same one.
func (b balanced) testRounds(t *testing.T, client *lab.Caller) {
	t.Helper()
	counts := make([]int, len(b.backends))
	for range 30 {
		counts[slices.Index(b.backends, b.ask(t, client, b.at[0]))]++
	}
	if slices.Min(counts) < 9 || slices.Max(counts) > 11 { // nine rounds, and parts of two
		t.Errorf("of 30 flows, the backends get %v", counts)
	}
}

// testSourceHash tests that a client, which is its address, gets the backend of its hash in the table, at every
// address of the service.
func (w *world) testSourceHash(t *testing.T, way way, pod *lab.Caller) {
	w.needsNode(t)
	b := w.balance(t, way, maps.AlgorithmSH, 0)
	own := way.ofFamily(w.client.IPv4, w.client.IPv6)
	for client, addr := range map[*lab.Caller]netip.Addr{pod: own, w.pod(t): own, w.host(t): way.ofFamily(w.node.IPv4, w.node.IPv6)} {
		want := b.hashedTo(addr)
		for i := range 6 {
			if got := b.ask(t, client, b.at[i%3]); got != want {
				t.Fatalf("backend %d, want %d", got, want)
			}
		}
	}
}

// testDestinationHash tests that an address has its backend for all clients.
func (w *world) testDestinationHash(t *testing.T, way way, pod *lab.Caller) {
	b := w.balance(t, way, maps.AlgorithmDH, 0)
	for _, at := range b.at {
		addr := netip.MustParseAddrPort(at).Addr().As16()
		want := mapstest.Hashed(b.table, addr[:])
		for _, client := range []*lab.Caller{pod, w.host(t), pod} {
			if got := b.ask(t, client, at); got != want {
				t.Fatalf("%s leads to backend %d, want %d", at, got, want)
			}
		}
	}
}

// With every algorithm, a client keeps the backend of its affinity, a backend that is
// gone is not chosen, and a Service works with one backend and refuses with none.
func TestAllAlgorithms(t *testing.T) {
	w := newWorld(t)
	w.needsErrors(t)
	client := w.pod(t)
	for _, algorithm := range allAlgorithms {
		t.Run(fmt.Sprintf("algorithm %d", algorithm), func(t *testing.T) {
			for _, way := range []way{ways[0], ways[3], ways[4]} {
				kept := w.balance(t, way, algorithm, 1000)
				first := kept.ask(t, client, kept.at[0])
				for i := range 8 {
					if got := kept.ask(t, client, kept.at[i%3]); got != first {
						t.Fatalf("%s, with affinity: backend %d after %d", way.name, got, first)
					}
				}
				b := w.balance(t, way, algorithm, 0)
				w.forget(t, b.backends[1])
				for i := range 12 {
					b.ask(t, client, b.at[i%3]) // fails without an answer
				}
				if got, want := w.countOf(t, b.id), uint64(12); got != want {
					t.Errorf("%s: %d flows of the Service were translated, want %d", way.name, got, want)
				}
				w.publish(t, b.service, b.backends[2])
				for range 5 {
					if got := b.ask(t, client, b.at[0]); got != b.backends[2] {
						t.Fatalf("%s, with one backend: %d", way.name, got)
					}
				}
				w.publish(t, b.service)
				if _, err := client.Exchange(lab.Exchange{Network: way.network, Address: b.at[0], Unconnected: way.unconnected}); err == nil {
					t.Errorf("%s, without backends: there is an answer", way.name)
				}
			}
		})
	}
}

// countOf returns how many new flows of a service port were translated.
func (w *world) countOf(t testing.TB, id uint32) uint64 {
	t.Helper()

	return w.stats(t, id)[uint32(maps.ReasonTranslated)]
}

// stats returns the statistics of a service port.
func (w *world) stats(t testing.TB, id uint32) map[uint32]uint64 {
	t.Helper()
	counts := make(map[uint32]uint64)
	for e, err := range w.Maps().Stats.All() {
		lab.Must(t, err)
		if e.Key.ServicePortId == id {
			counts[e.Key.What] = e.Value
		}
	}

	return counts
}

// The backend with the least load is chosen among up to 64; of more, among 64 at random.
func TestLeastBusyOfMany(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	for i, algorithm := range []uint8{maps.AlgorithmSED, maps.AlgorithmNQ} {
		at := fmt.Sprintf("10.96.0.%d:53", i+1)
		s := w.addLarge(t, 64, service{at: []string{at}, algorithm: algorithm})
		for j, id := range s.backends {
			if j != 40 {
				w.Maps().Loads.AddFlows(id, int32(3+j%5))
			}
		}
		for range 20 {
			if got := w.connected(t, client, at); got != s.backends[40] {
				t.Fatalf("backend %d of 64 with connections, though one has none", got)
			}
		}
		many := fmt.Sprintf("10.96.1.%d:53", i+1)
		large := w.addLarge(t, 1000, service{at: []string{many}, algorithm: algorithm})
		idle := map[uint32]bool{}
		for j, id := range large.backends {
			if idle[id] = j%4 == 0; !idle[id] {
				w.Maps().Loads.AddFlows(id, 1)
			}
		}
		for range 20 {
			if got := w.connected(t, client, many); !idle[got] {
				t.Fatalf("backend %d of 1000 has a connection, and a quarter has none", got) // chance: 10⁻⁷ a run
			}
		}
	}
}

// Every slot of a table is found equally often by the flows of sockets.
func TestMaglevSelection(t *testing.T) {
	w := newWorld(t)
	const connects, size = 10000, 10
	s := w.addLarge(t, size, service{at: []string{"10.96.0.1:53"}, algorithm: maps.AlgorithmMaglev})
	many := w.start(t, w.client.Namespace, "connect many", s.at[0], fmt.Sprint(connects))
	many.line(t)
	chosen := w.chosen(t, s)
	many.rest(t)
	counts := make([]int, size)
	for i, id := range s.backends {
		counts[i] = chosen[id]
	}
	lab.MustBeFair(t, "of connect()", counts, lab.Even(size))
}
