package bpf

import (
	"fmt"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
)

// three are backends with different places.
var three = []string{portPodToo, tapPod, remotePod}

// opens has a client begin a flow, and returns which backend it gets.
func (w *world) opens(t testing.TB, p place, in packet, of ...string) string {
	t.Helper()
	w.ingress(t, p, in).ends(verdictNext, maps.ReasonTranslated)

	return w.backendOf(t, w.flowOf(t, in.src.String(), in.dst.String()), of...)
}

// load returns the number of flows of a backend.
func (w *world) load(s published, backend string) int {
	return int(w.maps.Loads.Load(s.backends[backend]).Flows)
}

// busy adds flows to the load of backends.
func (w *world) busy(s published, loads map[string]int32) {
	for backend, load := range loads {
		w.maps.Loads.AddFlows(s.backends[backend], load)
	}
}

// The backend that a new flow gets, by algorithm. Each flow adds to the load of its backend.
func TestAlgorithms(t *testing.T) {
	for _, proto := range transports {
		t.Run(proto.String(), func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				serve := func(algorithm uint8) published {
					return w.serve(t, service{at: []string{clusterIP}, proto: proto, to: three, algorithm: algorithm})
				}
				port := uint16(1000)
				next := func() string {
					port++

					return w.opens(t, p, first(proto, p.client, clusterIP).fromPort(port), three...)
				}

				serve(maps.AlgorithmRR)
				turns := []string{next(), next(), next()}
				for i := range 6 {
					if got := next(); got != turns[i%3] {
						t.Errorf("rr: %s comes after %v, want %s", got, turns, turns[i%3])
					}
				}
				if turns[0] == turns[1] || turns[1] == turns[2] || turns[0] == turns[2] {
					t.Errorf("rr: the turns are %v", turns)
				}

				lc := serve(maps.AlgorithmLC)
				w.busy(lc, map[string]int32{three[0]: 50, three[1]: 99, three[2]: 0})
				seen := make(map[string]int)
				for range 24 {
					seen[next()]++
				}
				if seen[three[1]] > 0 || seen[three[0]] == 0 || seen[three[2]] == 0 {
					t.Errorf("lc: with 50, 99 and 0 connections, they got %v more", seen)
				}

				sed := serve(maps.AlgorithmSED)
				w.busy(sed, map[string]int32{three[0]: 5, three[1]: 3, three[2]: 9})
				seen = make(map[string]int)
				for range 7 {
					seen[next()]++
				}
				if a, b, c := w.load(sed, three[0]), w.load(sed, three[1]), w.load(sed, three[2]); a+b != 15 || max(a, b)-min(a, b) != 1 || c != 9 {
					t.Errorf("sed: with 5, 3 and 9 connections, they got %v more", seen)
				}

				nq := serve(maps.AlgorithmNQ)
				w.busy(nq, map[string]int32{three[0]: 2, three[1]: 0, three[2]: 3})
				for i, want := range []string{three[1], three[1]} { // idle, then the least busy
					if got := next(); got != want {
						t.Errorf("nq: flow %d goes to %s, want %s", i+1, got, want)
					}
				}
			})
		})
	}
}

// Two CPUs count at the same time, and a decrement may come first: a load below zero counts as none.
func TestLoadBelowZero(t *testing.T) {
	for _, algorithm := range []uint8{maps.AlgorithmLC, maps.AlgorithmSED, maps.AlgorithmNQ} {
		t.Run(fmt.Sprintf("algorithm %d", algorithm), func(t *testing.T) {
			each(t, []place{uplink}, func(t *testing.T, w *world, p place) {
				two := three[:2]
				s := w.serve(t, service{at: []string{clusterIP}, to: two, algorithm: algorithm})
				for i := range 16 { // it may be compared first, or last
					w.busy(s, map[string]int32{two[0]: -1 - int32(w.load(s, two[0])), two[1]: 2 - int32(w.load(s, two[1]))})
					in := tcp(p.client, clusterIP, "S").fromPort(uint16(7000 + i))
					if got := w.opens(t, p, in, two...); got != two[0] {
						t.Fatalf("with -1 and 2 connections, flow %d goes to %s", i+1, got)
					}
				}
				got := make(map[string]int)
				for i := range 64 {
					w.busy(s, map[string]int32{two[0]: -5 - int32(w.load(s, two[0])), two[1]: -int32(w.load(s, two[1]))})
					got[w.opens(t, p, tcp(p.client, clusterIP, "S").fromPort(uint16(7100+i)), two...)]++
				}
				if len(got) != 2 {
					t.Errorf("with -5 and no connections, flows go to %v", got)
				}
			})
		})
	}
}

// Algorithms that hash use the table, with the same hash on every node that has the same seed: the same packet gets
// the same backend on each of them.
func TestHashes(t *testing.T) {
	other := "8.0.96.77:80"
	for _, test := range []struct {
		name      string
		algorithm uint8
		of        func(*world, packet) []byte
		same      func(in packet, i int) packet // packets that get the same
	}{
		{"the client's address", maps.AlgorithmSH, func(w *world, in packet) []byte {
			addr := w.mapAddr(in.src.String())

			return addr.Bytes[:]
		}, func(in packet, i int) packet {
			return in.fromPort(uint16(2000 + i)).to([]string{clusterIP, other}[i%2])
		}},
		{"the address that was vip", maps.AlgorithmDH, func(w *world, in packet) []byte {
			addr := w.mapAddr(in.dst.String())

			return addr.Bytes[:]
		}, func(in packet, i int) packet { return in.from(fmt.Sprintf("8.0.100.%d:%d", 10+i, 3000+i)) }},
		{"the flow", maps.AlgorithmMaglev, func(w *world, in packet) []byte { return flowBytes(t, w, in) },
			func(in packet, _ int) packet { return in }},
	} {
		t.Run("by "+test.name, func(t *testing.T) {
			for i, proto := range transports {
				seed := SeedOf(seedTexts[i%2])
				eachFamily(t, func(t *testing.T, f family) {
					seen := make(map[string]bool)
					w := newWorld(t, f, withSeed(seed))
					s := w.serve(t, service{at: []string{clusterIP, other}, proto: proto, to: three, algorithm: test.algorithm})
					for i := range 12 {
						in := first(proto, fmt.Sprintf("8.0.101.%d:%d", i+1, 40000+i), []string{clusterIP, other}[i%2])
						want := mapstest.HashedBy(seed, s.table, test.of(w, in))
						for j, p := range []place{uplink, podVeth, tunnel} {
							again := test.same(in, j)
							w.forgetFlows(t)
							if got := w.opens(t, p, again, three...); got != want {
								t.Fatalf("at %s, %s to %s gets %s, want %s", p, again.src, again.dst, got, want)
							}
						}
						seen[want] = true
					}
					if len(seen) < 2 {
						t.Errorf("all got the same: %v", seen)
					}
				})
			}
		})
	}
}

// forgetFlows ends all flows.
func (w *world) forgetFlows(t testing.TB) {
	t.Helper()
	for _, e := range w.entries(t) {
		w.delete(t, e)
	}
}

// All algorithms respect affinity first, never choose a backend that is gone, always choose the only
// backend, and refuse the client without any.
func TestAllAlgorithms(t *testing.T) {
	for _, algorithm := range []uint8{
		maps.AlgorithmRandom, maps.AlgorithmRR, maps.AlgorithmLC, maps.AlgorithmSED,
		maps.AlgorithmNQ, maps.AlgorithmSH, maps.AlgorithmDH, maps.AlgorithmMaglev,
	} {
		t.Run(fmt.Sprintf("algorithm %d", algorithm), func(t *testing.T) {
			each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
				from := uint16(5000)
				next := func(s service) string {
					from++
					in := first(layers.IPProtocolTCP, p.client, s.at[0])

					return w.opens(t, p, in.fromPort(from), three...)
				}
				kept := service{at: []string{"8.0.96.11:80"}, to: three, algorithm: algorithm, affinity: 1000}
				w.serve(t, kept)
				had := next(kept)
				for range 6 {
					if got := next(kept); got != had {
						t.Fatalf("with affinity, %s after %s", got, had)
					}
				}
				gone := service{at: []string{"8.0.96.12:80"}, to: three, algorithm: algorithm}
				s := w.serve(t, gone)
				w.removeBackend(t, s, three[1])
				for range 10 {
					if got := next(gone); got == three[1] {
						t.Fatal("a backend that has gone is chosen")
					}
				}
				one := service{at: []string{"8.0.96.13:80"}, to: three[:1], algorithm: algorithm}
				w.serve(t, one)
				for range 4 {
					next(one)
				}
				w.serve(t, service{at: []string{"8.0.96.14:80"}, algorithm: algorithm})
				w.refused(t, p, tcp(p.client, "8.0.96.14:80", "S")).ends(verdictRedirect, maps.ReasonRejectNoBackend)
			})
		})
	}
}
