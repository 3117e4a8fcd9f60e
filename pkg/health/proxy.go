// Package health answers those who ask whether this node proxies Services: the
// kubelet and load balancers at /healthz, /livez and /readyz ([Proxy] judges,
// [Handler] answers), and load balancers that look for nodes with endpoints at
// the health check node ports of Services ([Services]).
//
// The answers are kube-proxy's, byte by byte, but for /readyz, which it does not
// have.
package health

import (
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ProxyConfig is what a [Proxy] judges by.
type ProxyConfig struct {
	// Families are those that this node has.
	Families []lb.Family
	// Timeout is how long a change may wait to be in force, and programs may be
	// without effect. Zero is a minute: kube-proxy's 2 x syncPeriod.
	Timeout time.Duration
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
}

// Proxy knows whether what the cluster says comes into force in time. It never
// waits for those who do the work, and so finds out when they hang. Any goroutine
// may use it.
type Proxy struct {
	cfg ProxyConfig

	mu      sync.Mutex
	updated time.Time // when all was in force last, or the start-up
	judged  bool      // all was in force once
	waiting time.Time // since when there is a change that nobody has taken up
	working time.Time // since when there is one that was taken up and is not in force
	without time.Time // since when programs are without effect
	apart   time.Time // since when they are not where packets from outside come by
}

// NewProxy returns a Proxy that has not started.
func NewProxy(cfg ProxyConfig) *Proxy {
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}

	return &Proxy{cfg: cfg}
}

// Started says that changes are being worked off. Until they were once
// ([Proxy.Applied]), the proxy is starting, and healthy however long that takes:
// whoever ended it would only have it start again.
func (p *Proxy) Started() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updated = p.cfg.Now()
}

// Queued says that there is a change to be taken up.
func (p *Proxy) Queued() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting = earliest(p.waiting, p.cfg.Now())
}

// Taken says that what was queued is being worked on now, or something else is
// that must come to an end. Repeated calls count as the first one.
func (p *Proxy) Taken() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.working = earliest(earliest(p.working, p.waiting), p.cfg.Now())
	p.waiting = time.Time{}
}

// Applied says that all that was taken up is in force, or in turn: that work which comes
// around goes on is enough, however much one Service makes of it.
func (p *Proxy) Applied() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updated = p.cfg.Now()
	p.judged = true
	p.working = time.Time{}
}

// Effective says whether what is in force takes effect.
func (p *Proxy) Effective(effective bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if effective {
		p.without = time.Time{}
	} else {
		p.without = earliest(p.without, p.cfg.Now())
	}
}

// Attached says whether programs are where packets from outside come by.
func (p *Proxy) Attached(attached bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if attached {
		p.apart = time.Time{}
	} else {
		p.apart = earliest(p.apart, p.cfg.Now())
	}
}

// Healthy says whether no change waits for too long, and programs take effect.
func (p *Proxy) Healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.healthy(p.cfg.Now())
}

func (p *Proxy) healthy(now time.Time) bool {
	if !p.judged {
		return true
	}
	since := earliest(earliest(p.waiting, p.working), earliest(p.without, p.apart))

	return since.IsZero() || now.Sub(since) < p.cfg.Timeout
}

// report returns what is known at this moment.
func (p *Proxy) report() report {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	r := report{LastUpdated: p.updated, CurrentTime: now, Healthy: p.healthy(now)}
	if p.updated.IsZero() {
		return r
	}
	r.Status = make(map[string]familyReport, len(p.cfg.Families))
	for _, family := range p.cfg.Families {
		r.Status[family.String()] = familyReport{LastUpdated: p.updated, Healthy: r.Healthy}
	}

	return r
}

// earliest returns the earlier one of two times, of which a zero one is none.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}

	return a
}
