// Package flows drives packet flows, as a file describes them, through a real
// agent and real sockets. It has nothing but tests.
package flows

import (
	"fmt"
	"os"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
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
	var all tally
	t.Cleanup(func() { t.Logf("%s: %s", path, &all) }) // when the parallel ones have ended
	for i := range scenarios {
		t.Run(scenarios[i].Name, func(t *testing.T) {
			t.Parallel()
			play(t, &scenarios[i], &all)
		})
	}
}

// play runs all flows of a scenario and prints a verdict on each.
func play(t *testing.T, s *scenario, all *tally) {
	next := 0
	defer func() {
		if t.Skipped() {
			return
		}
		for _, f := range s.Flows[next:] {
			all.add(failed)
			fmt.Fprintf(t.Output(), "%s %s / %s: not played\n", failed, s.Name, f.Name)
		}
	}()
	var d *driver
	if len(s.driven()) > 0 {
		d = mustDriver(t, s)
	}
	for ; next < len(s.Flows); next++ {
		v, text := d.verdict(t, s, s.Flows[next])
		all.add(v)
		fmt.Fprintln(t.Output(), text)
		if v == failed {
			t.Fail()
		}
	}
}

// verdict is what a line about a flow begins with.
type verdict string

const (
	passed   verdict = "ok"
	failed   verdict = "FAIL"
	toDevice verdict = "device" // not for sockets to judge
)

// verdict drives a flow, if that can be done from a socket. The driver may be nil
// if no flow of the scenario can.
func (d *driver) verdict(t *testing.T, s *scenario, f flow) (v verdict, text string) {
	t.Helper()
	title := s.Name + " / " + f.Name
	from, why := s.sourceOf(f)
	if from == fromDevice {
		return toDevice, fmt.Sprintf("%s %s (%s)", toDevice, title, why)
	}
	detail, wrong := d.drive(t, s, f, s.expect(f))
	if wrong != "" {
		return failed, fmt.Sprintf("%s socket %s %s: %s", failed, from, title, wrong)
	}

	return passed, fmt.Sprintf("%s socket %s %s: %s", passed, from, title, detail)
}

// tally counts verdicts.
type tally struct {
	mu     sync.Mutex
	counts map[verdict]int
}

func (a *tally) add(v verdict) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counts == nil {
		a.counts = map[verdict]int{}
	}
	a.counts[v]++
}

func (a *tally) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	sockets := a.counts[passed] + a.counts[failed]

	return fmt.Sprintf("%d cases: %d from sockets (%d ok, %d failed), %d belong to the device datapath",
		sockets+a.counts[toDevice], sockets, a.counts[passed], a.counts[failed], a.counts[toDevice])
}
