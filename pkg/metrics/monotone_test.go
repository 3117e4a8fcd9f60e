package metrics

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	abi "github.com/sluice-lb/sluice/maps"
)

// Whatever happens between two scrapes, a counter of a Service never falls while its agent runs, and
// never shows more than was counted since that agent started. Services and ids come and go, maps cannot
// be read for a while, and agents start anew, which scrapes see at any moment.
func TestCountersOnlyGrow(t *testing.T) {
	for seed := range uint64(200) {
		w := newWorld()
		random := rand.New(rand.NewPCG(seed, 1))
		ids := make(map[uint32]string) // of the Services that exist
		next := uint32(1)
		add := func() {
			ids[next] = fmt.Sprintf("s%d", random.IntN(4))
			w.add(next, "ns", ids[next], fmt.Sprint(next))
			next++
		}
		add()
		s := w.services(t, 2)
		var counted float64              // by this agent's programs, of everything
		last := make(map[string]float64) // what the scrape before showed
		scrape := func(when string) {
			t.Helper()
			now := show(t, s)
			maps.DeleteFunc(now, func(name string, _ float64) bool { return !strings.Contains(name, "_total ") })
			for name, n := range now {
				if n < last[name] || n > counted {
					t.Fatalf("seed %d, %s: %s is %v; it was %v, and %v were counted", seed, when, name, n, last[name], counted)
				}
			}
			last = now // a series that is gone may come again from zero
		}
		for range 100 {
			switch random.IntN(8) {
			case 0:
				add()
			case 1:
				for id := range ids {
					w.remove(id)
					if random.IntN(2) == 0 {
						w.stats.end(id)
					}
					delete(ids, id)

					break
				}
			case 2:
				s, counted, last = w.services(t, 2), 0, nil
				scrape("right after a start")
			case 3:
				w.stats.fail = errBroken
				w.later()
				if _, err := s.Gather(); err == nil {
					t.Fatal("a scrape of maps that cannot be read shows something")
				}
				w.stats.fail = nil
			case 4:
				w.later()
			default:
				for id := range ids {
					for _, what := range []uint32{sent, noBackend, abi.StatBytesSent, abi.StatRetransmits} {
						n := random.Uint64N(100)
						w.count(id, what, n)
						counted += float64(n)
					}
				}
			}
			scrape("later")
		}
	}
}
