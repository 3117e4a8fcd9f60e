package scene

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Load is clients that dial at a steady rate while the test changes objects.
type Load struct {
	started time.Time
	dials   []Dial
	running []*lab.RunningLoad
}

// MustDial starts to dial: each of dials that often a second, with a new
// connection each time.
func MustDial(t testing.TB, rate int, dials ...Dial) *Load {
	t.Helper()
	l := &Load{started: time.Now(), dials: dials}
	for _, d := range dials {
		running, err := d.From.StartLoad(lab.Load{Exchange: d.Exchange(), Rate: rate})
		Must(t, err)
		l.running = append(l.running, running)
	}

	return l
}

// MustHaveWorked ends the load. The test fails if one single exchange did, or if
// there were too few.
func (l *Load) MustHaveWorked(t testing.TB) {
	t.Helper()
	for i, running := range l.running {
		report, err := running.Stop()
		Must(t, err)
		t.Logf("%s: %d exchanges in %v, the longest took %v", l.dials[i], report.Started,
			time.Since(l.started).Round(time.Millisecond), report.Longest.Round(time.Microsecond))
		if n := len(report.Failures); n > 0 {
			t.Errorf("%s: %d of %d failed: %v", l.dials[i], n, report.Started, report.Failures[:min(n, 10)])
		}
		if report.Succeeded < 3 {
			t.Errorf("%s: %d succeeded, too few", l.dials[i], report.Succeeded)
		}
	}
}
