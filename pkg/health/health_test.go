package health

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// fakeClock is a clock that a test turns.
type fakeClock struct{ now time.Time }

func (c *fakeClock) Now() time.Time { return c.now }

func (c *fakeClock) wait(d time.Duration) { c.now = c.now.Add(d) }

// newTestProxy returns a Proxy of both families with a timeout of a minute.
func newTestProxy() (*Proxy, *fakeClock) {
	clock := &fakeClock{now: start}

	return NewProxy(ProxyConfig{Families: []lb.Family{lb.IPv4, lb.IPv6}, Now: clock.Now}), clock
}

// What happens to a proxy, one letter each:
//
//	S started  Q queued  T taken up  A applied  F cannot be applied  + effective  - without effect
//	U attached to uplinks  D not so  . half a minute passes
func live(p *Proxy, clock *fakeClock, life string) {
	for _, event := range life {
		switch event {
		case 'S':
			p.Started()
		case 'Q':
			p.Queued()
		case 'T':
			p.Taken()
		case 'A':
			p.Applied()
		case 'F':
			p.NotApplied()
		case '+':
			p.Effective(true)
		case '-':
			p.Effective(false)
		case 'U':
			p.Attached(true)
		case 'D':
			p.Attached(false)
		case '.':
			clock.wait(30 * time.Second)
		default:
			panic(event)
		}
	}
}

func TestHealthy(t *testing.T) {
	for _, test := range []struct {
		name    string
		life    string
		healthy bool
	}{
		{"unhealthy when nothing can be applied", "STAQTF..", false},
		{"healthy when it can be applied after all", "STAQTF.TF.TA", true},
		{"healthy before it starts", "", true},
		{"healthy while it starts, however long that takes", "SQT....Q....", true},
		{"healthy when an uplink was out of reach for less than a minute", "SQTAD.DU.", true},
		{"healthy when it is out of reach for half a minute", "SQTAD.D", true},
		{"unhealthy when an uplink is out of reach for a minute", "SQTAD..", false},
		{"healthy when that is over", "SQTAD...U", true},
		{"healthy when nothing was ever applied, and hooks are without effect", "S-....", true},
		{"healthy with nothing to do", "STA....", true},
		{"healthy while a change is not late", "STAQ.", true},
		{"unhealthy with a change that is not taken", "STAQ..", false},
		{"unhealthy with a change that is not applied in time", "STAQT..", false},
		{"unhealthy by the oldest change", "STAQ.Q.", false},
		{"unhealthy by the oldest change, taken up or not", "STAQT.Q.", false},
		{"unhealthy by a change that was taken up late", "STAQ.T.", false},
		{"healthy when the oldest change is applied in time", "STAQT.QA.", true},
		{"unhealthy when only the oldest change is applied", "STAQT.QA..", false},
		{"healthy as long as changes are applied in time", "STAQ.TAQ.TAQ.TAQ.TA", true},
		{"healthy again once all is applied", "STAQ...TA", true},
		{"unhealthy with work that does not end, although nothing was queued", "STAT..", false},
		{"unhealthy with work that was begun again and again", "STAT.T.", false},
		{"healthy while programs are without effect for a moment", "STA-.", true},
		{"unhealthy with programs without effect", "STA-..", false},
		{"unhealthy with programs found without effect again and again", "STA-.-.-", false},
		{"healthy as long as programs take effect in between", "STA-.+-.+-.", true},
		{"healthy again once programs take effect", "STA-...+", true},
		{"unhealthy without effect, although changes are applied", "STA-.QTA.QTA", false},
		{"unhealthy without effect since before the first change was applied", "S-...TA", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, clock := newTestProxy()
			live(p, clock, test.life)
			if healthy := p.Healthy(); healthy != test.healthy {
				t.Errorf("healthy is %t, want %t", healthy, test.healthy)
			}
		})
	}
}

// A restart mends a loop that hangs, and nothing else.
func TestAlive(t *testing.T) {
	for _, test := range []struct {
		name  string
		life  string
		alive bool
	}{
		{"alive before it starts", "", true},
		{"alive while it starts", "SQT....Q....", true},
		{"alive with nothing to do", "STA....", true},
		{"alive without effect", "STA-....", true},
		{"alive with an uplink out of reach", "STAD....", true},
		{"alive when nothing can be applied", "STAQTF.TF.TF.QTF.", true},
		{"not alive with a change that is not taken", "STAQ..", false},
		{"not alive with a change whose work does not end", "STAQT..", false},
		{"not alive by the oldest change", "STAQT.Q.T.", false},
		{"not alive with work that does not end, after some that failed", "STAQTF...QT..", false},
		{"alive again when the work has ended", "STAQT...F", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, clock := newTestProxy()
			live(p, clock, test.life)
			if alive := p.report(p.alive).Healthy; alive != test.alive {
				t.Errorf("alive is %t, want %t", alive, test.alive)
			}
		})
	}
}

// The timeout is over when it has passed in full, and not a moment earlier.
func TestTimeoutIsExact(t *testing.T) {
	p, clock := newTestProxy()
	p.cfg.Timeout = 10 * time.Second
	live(p, clock, "STAQ")
	clock.wait(10*time.Second - 1)
	if !p.Healthy() {
		t.Error("unhealthy too early")
	}
	clock.wait(1)
	if p.Healthy() {
		t.Error("still healthy when the time is over")
	}
}
