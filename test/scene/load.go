package scene

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Load is clients that dial at a steady rate while the test changes objects.
type Load struct {
	started time.Time
	rate    int
	dials   []Dial
	running []*lab.RunningLoad
}

// MustDial starts to dial: each of dials that often a second, with a new
// connection each time.
func MustDial(t testing.TB, rate int, dials ...Dial) *Load {
	t.Helper()
	l := &Load{started: time.Now(), rate: rate, dials: dials}
	for _, d := range dials {
		running, err := d.From.StartLoad(lab.Load{Exchange: d.Exchange(), Rate: rate})
		lab.Must(t, err)
		l.running = append(l.running, running)
	}

	return l
}

// MustHaveWorked ends the load. The test fails if one single exchange did, or if
// there were too few.
func (l *Load) MustHaveWorked(t testing.TB) {
	t.Helper()
	l.mustEnd(t, func(time.Duration) int { return 3 })
}

// MustKeepUp is MustHaveWorked, and fails the test also if less than nine tenths of the
// rate were done.
func (l *Load) MustKeepUp(t testing.TB) {
	t.Helper()
	l.mustEnd(t, func(elapsed time.Duration) int { return int(elapsed.Seconds() * float64(l.rate) * 0.9) })
}

// mustEnd ends the load. At least so many exchanges must have succeeded.
func (l *Load) mustEnd(t testing.TB, least func(elapsed time.Duration) int) {
	t.Helper()
	elapsed := time.Since(l.started)
	for i, running := range l.running {
		report, err := running.Stop()
		lab.Must(t, err)
		t.Logf("%s: %d exchanges in %v, the longest took %v", l.dials[i], report.Started,
			elapsed.Round(time.Millisecond), report.Longest.Round(time.Microsecond))
		if n := len(report.Failures); n > 0 {
			t.Errorf("%s: %d of %d failed: %v", l.dials[i], n, report.Started, report.Failures[:min(n, 10)])
		}
		if want := least(elapsed); report.Succeeded < want {
			t.Errorf("%s: %d succeeded in %v, want %d at the least", l.dials[i], report.Succeeded, elapsed, want)
		}
	}
}
