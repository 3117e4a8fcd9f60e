package e2e

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// load is clients that never pause while the test changes things.
type load struct {
	rate    int
	started time.Time
	dials   []dial
	running []*lab.RunningLoad
}

// mustDial starts to dial: each of dials that often a second, with a new
// connection each time.
func mustDial(t testing.TB, rate int, dials ...dial) *load {
	t.Helper()
	l := &load{rate: rate, started: time.Now(), dials: dials}
	for _, d := range dials {
		running, err := d.from.StartLoad(lab.Load{
			Exchange: lab.Exchange{Network: d.network, Address: d.address},
			Rate:     rate,
		})
		if err != nil {
			t.Fatal(err)
		}
		l.running = append(l.running, running)
	}

	return l
}

// mustHaveWorked ends the load. The test fails if one single exchange did, or
// if there were too few.
func (l *load) mustHaveWorked(t testing.TB) {
	t.Helper()
	elapsed := time.Since(l.started)
	for i, running := range l.running {
		report, err := running.Stop()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d exchanges in %v, the longest took %v",
			l.dials[i], report.Started, elapsed.Round(time.Millisecond), report.Longest.Round(time.Microsecond))
		if n := len(report.Failures); n > 0 {
			t.Errorf("%s: %d of %d failed: %v", l.dials[i], n, report.Started, report.Failures[:min(n, 10)])
		}
		if least := int(elapsed.Seconds() * float64(l.rate) * 0.9); report.Succeeded < least {
			t.Errorf("%s: %d succeeded in %v, want %d at the least", l.dials[i], report.Succeeded, elapsed, least)
		}
	}
}
