package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// fairFlows is how many flows a row begins in each state: of seven backends, one that gets nothing, or three times its share, is
// seen ([lab.CheckShares]).
const fairFlows = 600

// idleAfter returns the loads of n backends of which the first are busy, as those are that were there before
// the others came: their ids are side by side.
func idleAfter(busy, n int) []int32 {
	loads := make([]int32, n)
	for i := range busy {
		loads[i] = 1000
	}

	return loads
}

// manyPods are n backends on this node.
func manyPods(n int) []string { return podsOf("8.0.4", n) }

// podsOf are n backends with addresses that begin so.
func podsOf(network string, n int) []string {
	pods := make([]string, n)
	for i := range pods {
		pods[i] = fmt.Sprintf("%s.%d:%d", network, 10+i%200, 8080+i/200)
	}

	return pods
}

// eachFairPlace runs a test with every protocol and family, two of which begin at each kind of device, and n backends
// there: those to which packets are turned around are on another node.
func eachFairPlace(t *testing.T, n int, run func(t *testing.T, w *world, p place, of service)) {
	t.Helper()
	for i, proto := range transports {
		t.Run(proto.String(), func(t *testing.T) {
			eachFamily(t, func(t *testing.T, f family) {
				p := []place{uplink, podVeth, turning}[i]
				if f == ipv6 {
					p = []place{uplink, podVeth, turning}[(i+1)%3]
				}
				of := service{at: []string{clusterIP}, proto: proto, to: manyPods(n), here: true}
				if p.turns {
					of.to, of.here = podsOf("8.0.2", n), false
				}
				run(t, newWorldAt(t, p, f), p, of)
			})
		})
	}
}

// fairClient is the i-th of many clients, each with an address and a port of its own.
func fairClient(i int) string { return fmt.Sprintf("8.0.%d.%d:%d", 101+i/250%8, 1+i%250, 20000+i) }

// begins has clients from number first on begin n flows, and returns how many each of the backends gets. Loads
// stay as they are.
func (w *world) begins(t *testing.T, p place, s published, vip string, proto layers.IPProtocol, to []string, first, n int) []int {
	t.Helper()
	counts := make([]int, len(to))
	for i := range n {
		counts[w.beginsOne(t, p, s, vip, proto, to, first+i)]++
	}

	return counts
}

// beginsOne has a client begin a flow, and returns which of the backends gets it.
func (w *world) beginsOne(t *testing.T, p place, s published, vip string, proto layers.IPProtocol, to []string, number int) int {
	t.Helper()
	before := make([]int, len(to))
	for i, backend := range to {
		before[i] = w.load(s, backend)
	}
	w.ingress(t, p, first(proto, fairClient(number), vip)).ends(p.sendsAway(), maps.ReasonTranslated)
	for i, backend := range to {
		if w.load(s, backend) != before[i] {
			w.maps.Loads.AddFlows(s.backends[backend], -1)

			return i
		}
	}
	t.Fatalf("no backend of %s has got the flow of client %d", vip, number)

	return 0
}

// Each algorithm gives every backend its share of new flows at devices, also when the number of backends has
// changed.
func TestFairAtDevices(t *testing.T) {
	for _, row := range []struct {
		name      string
		algorithm uint8
		loads     []int32
	}{
		{"random", maps.AlgorithmRandom, make([]int32, 7)},
		{"rr", maps.AlgorithmRR, make([]int32, 7)},
		{"lc, all idle", maps.AlgorithmLC, make([]int32, 7)},
		{"lc, all busy alike", maps.AlgorithmLC, []int32{9, 9, 9, 9, 9}},
		{"lc, two busy ones", maps.AlgorithmLC, []int32{0, 9, 3, 0, 0}},
		{"sed, all idle", maps.AlgorithmSED, make([]int32, 7)},
		{"sed, all busy alike", maps.AlgorithmSED, []int32{9, 9, 9, 9, 9}},
		{"sed, five busy ones in a row", maps.AlgorithmSED, idleAfter(5, 10)},
		{"sed, one idle and two busy ones in turn", maps.AlgorithmSED, []int32{0, 3, 3, 0, 3, 3, 0, 0}},
		{"sed, nearly all of many busy", maps.AlgorithmSED, idleAfter(54, 60)},
		{"sed, half of many busy", maps.AlgorithmSED, idleAfter(50, 100)},
		{"nq, all idle", maps.AlgorithmNQ, make([]int32, 7)},
		{"nq, five busy ones in a row", maps.AlgorithmNQ, idleAfter(5, 10)},
		{"sh", maps.AlgorithmSH, make([]int32, 7)},
		{"maglev", maps.AlgorithmMaglev, make([]int32, 7)},
	} {
		t.Run("by "+row.name, func(t *testing.T) {
			t.Logf("%d flows", fairFlows)
			eachFairPlace(t, len(row.loads), func(t *testing.T, w *world, p place, svc service) {
				svc.algorithm = row.algorithm
				to, proto := svc.to, svc.proto
				s := w.serve(t, svc)
				for i, backend := range to {
					w.maps.Loads.AddFlows(s.backends[backend], row.loads[i])
				}
				counts := w.begins(t, p, s, clusterIP, proto, to, 0, fairFlows)
				lab.MustBeFair(t, "before a change", counts, mapstest.Shares(row.algorithm, row.loads))
				if row.algorithm == maps.AlgorithmRR && slices.Max(counts)-slices.Min(counts) > 1 {
					t.Errorf("rr gives %v, want the same to each", counts)
				}

				for i, to := range [][]string{to[:len(to)-1], to} { // one leaves, and comes back
					for _, scope := range []uint8{maps.ScopeInternal, maps.ScopeExternal} {
						w.publish(t, &s, svc, scope, to)
					}
					counts := w.begins(t, p, s, clusterIP, proto, to, (i+1)*fairFlows, fairFlows)
					lab.MustBeFair(t, fmt.Sprintf("then with %d", len(to)), counts, mapstest.Shares(row.algorithm, row.loads[:len(to)]))
				}
			})
		})
	}
}

// By a hash of the VIP, each VIP has one backend for all clients, and each backend its share of many VIPs, also when one has
// left, and when it is back.
func TestDestinationHashIsFair(t *testing.T) {
	eachFairPlace(t, 5, func(t *testing.T, w *world, p place, svc service) {
		const vips, clients = 200, 2
		all := svc.to
		svc.algorithm, svc.at = maps.AlgorithmDH, nil
		for i := range vips {
			svc.at = append(svc.at, fmt.Sprintf("8.0.96.%d:80", 10+i))
		}
		s := w.serve(t, svc)
		for round, to := range [][]string{all, all[:4], all} {
			if round > 0 {
				for _, scope := range []uint8{maps.ScopeInternal, maps.ScopeExternal} {
					w.publish(t, &s, svc, scope, to)
				}
			}
			counts := make([]int, len(to))
			for i, vip := range svc.at {
				one := w.begins(t, p, s, vip, svc.proto, to, (round*vips+i)*clients, clients)
				at := slices.Index(one, clients)
				if at < 0 {
					t.Fatalf("of %d clients of %s, the backends get %v", clients, vip, one)
				}
				counts[at]++
			}
			lab.MustBeFair(t, fmt.Sprintf("of %d VIPs among %d", vips, len(to)), counts, lab.Even(len(to)))
		}
	})
}

// Round robin has a turn for each frontend, at each scope: who dials two in turn gets all backends of both.
func TestTurnOfEachFrontend(t *testing.T) {
	each(t, []place{uplink, podVeth}, func(t *testing.T, w *world, p place) {
		const other = "8.0.96.77:80"
		to := manyPods(2)
		s := w.serve(t, service{at: []string{clusterIP, other}, to: to, algorithm: maps.AlgorithmRR, here: true})
		counts := map[string][]int{clusterIP: make([]int, 2), other: make([]int, 2)}
		for i := range 60 {
			vip := []string{clusterIP, other}[i%2]
			counts[vip][w.beginsOne(t, p, s, vip, layers.IPProtocolTCP, to, i)]++
		}
		for vip, got := range counts {
			if got[0] != 15 || got[1] != 15 {
				t.Errorf("of 30 connections to %s, in turn with another frontend, the backends get %v", vip, got)
			}
		}
	})
}

// What a suspect would have got, all others get alike, whichever are side by side.
func TestFairBesideSuspects(t *testing.T) {
	const n, connections = 12, 3000
	for _, algorithm := range []uint8{
		maps.AlgorithmRandom, maps.AlgorithmRR, maps.AlgorithmLC, maps.AlgorithmSED, maps.AlgorithmNQ, maps.AlgorithmSH, maps.AlgorithmDH, maps.AlgorithmMaglev,
	} {
		for _, suspects := range []int{1, 5} {
			t.Run(fmt.Sprintf("algorithm %d, %d of %d", algorithm, suspects, n), func(t *testing.T) {
				s := newSimulation(t, n, maps.Pool{Algorithm: algorithm})
				shares := make([]float64, n)
				for i, id := range s.backends {
					if i >= suspects {
						shares[i] = 1 / float64(n-suspects)

						continue
					}
					lab.Must(t, s.tables.Health.Put(maps.Index(id), maps.BackendHealth{
						Id: id, Suspected: uint64(s.now), Until: uint64(s.now + time.Hour), Level: 1,
					}))
				}
				counts := make([]int, n)
				for range connections {
					counts[slices.Index(s.backends, s.pick(s.random.Uint32()))]++
				}
				lab.MustBeFair(t, "the others", counts, shares)
			})
		}
	}
}
