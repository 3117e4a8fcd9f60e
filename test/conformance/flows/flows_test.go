// Package flows drives packet flows, as a file describes them, through a real
// agent: from real sockets, and as packets that come by real devices. It has nothing but tests.
package flows

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	lab.UseProfile("tuned")
	os.Exit(m.Run())
}

// What kube-proxy does, as traced in the real one. $PACKETFLOWS may name another
// file of the same form.
func TestPacketFlows(t *testing.T) {
	path := os.Getenv("PACKETFLOWS")
	if path == "" {
		path = "../testdata/packetflows.yaml"
	}
	testFile(t, path)
}

// What follows from CONTRACT.md, and packetflows.yaml does not ask.
func TestFurtherFlows(t *testing.T) {
	testFile(t, "../testdata/extra.yaml")
}

func testFile(t *testing.T, path string) {
	scenarios := mustRead(t, path)
	var all caseCounts
	t.Cleanup(func() { t.Logf("%s: %s", path, &all) }) // when the parallel ones have ended
	for i := range scenarios {
		t.Run(scenarios[i].Name, func(t *testing.T) {
			t.Parallel()
			play(t, &scenarios[i], portsOfWorld, &all)
		})
	}
}

// play plays a scenario in one world, or in several if its flows need more than so
// many ports.
func play(t *testing.T, s *scenario, ports int, all *caseCounts) {
	parts := s.parts(ports)
	if len(parts) == 1 {
		playPart(t, s, all)
		return
	}
	for i := range parts {
		t.Run(fmt.Sprintf("part %d of %d", i+1, len(parts)), func(t *testing.T) {
			t.Parallel()
			playPart(t, &parts[i], all)
		})
	}
}

// playPart runs flows in a new world, on all their paths, and prints a verdict on each.
func playPart(t *testing.T, s *scenario, all *caseCounts) {
	next := 0
	defer func() {
		if t.Skipped() {
			return
		}
		for _, f := range s.Flows[next:] {
			all.add(nil)
			fmt.Fprintf(t.Output(), "%s %s / %s: not played\n", failed, s.Name, f.Name)
		}
	}()
	d := mustDriver(t, s)
	for ; next < len(s.Flows); next++ {
		f := s.Flows[next]
		verdicts := map[path]verdict{}
		for _, p := range s.paths(f) {
			v, text := d.verdict(t, s, f, p)
			verdicts[p] = v
			fmt.Fprintf(t.Output(), "%s %s %s / %s: %s\n", v, p, s.Name, f.Name, text)
			if v == failed {
				t.Fail()
			}
		}
		all.add(verdicts)
	}
}

// verdict is what a line about a flow begins with.
type verdict string

const (
	passed verdict = "ok"
	failed verdict = "FAIL"
)

// verdict drives a flow on a path.
func (d *driver) verdict(t *testing.T, s *scenario, f flow, p path) (v verdict, text string) {
	t.Helper()
	detail, wrong := d.drive(t, s, f, p)
	if wrong != "" {
		return failed, wrong
	}

	return passed, detail
}

// caseCounts counts cases by their outcome on each path.
type caseCounts struct {
	mu     sync.Mutex
	cases  map[verdict]int
	driven map[string]int // by path
}

// add counts a case. One that was driven nowhere has failed.
func (a *caseCounts) add(verdicts map[path]verdict) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cases == nil {
		a.cases, a.driven = map[verdict]int{}, map[string]int{}
	}
	of := passed
	if len(verdicts) == 0 {
		of = failed
	}
	for p, v := range verdicts {
		a.driven[p.String()]++
		if v == failed {
			of = failed
		}
	}
	a.cases[of]++
}

func (a *caseCounts) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var driven []string
	for _, p := range slices.Sorted(maps.Keys(a.driven)) {
		driven = append(driven, fmt.Sprintf("%d %s", a.driven[p], p))
	}

	return fmt.Sprintf("%d cases: %d ok, %d failed; driven: %s",
		a.cases[passed]+a.cases[failed], a.cases[passed], a.cases[failed], strings.Join(driven, ", "))
}
