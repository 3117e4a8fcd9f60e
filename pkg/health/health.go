// Package health answers health checks: whether this node proxies Services, for the
// kubelet and load balancers at /healthz, /livez and /readyz ([Proxy] decides,
// [Handler] answers), and whether a Service has endpoints on this node, for load
// balancers at its health check node port ([Services]). Beside that, [Backends] reports which backends
// do not answer clients of this node.
//
// The answers are kube-proxy's, byte by byte, except for /readyz, which it does not
// have.
package health

import (
	"encoding/json"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// ProxyConfig configures a [Proxy].
type ProxyConfig struct {
	// Families are those that this node has.
	Families []lb.Family
	// Timeout limits how long a change may take to be in force, and how long programs
	// may be without effect. Zero is a minute: kube-proxy's 2 x syncPeriod.
	Timeout time.Duration
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
}

// Proxy decides whether changes of the cluster come into force in time. It never waits
// for the goroutines that do the work, and so notices when they hang. Any goroutine may
// use it.
type Proxy struct {
	cfg ProxyConfig

	mu      sync.Mutex
	updated time.Time // when everything was in force last, or the start
	applied bool      // everything was in force once
	// Each of these is the time since which it is so, zero if it is not.
	queued      time.Time // a change waits to be taken
	taken       time.Time // a change was taken and is not in force
	working     time.Time // the goroutine that takes changes is at work
	ineffective time.Time // programs are without effect
	detached    time.Time // programs are not attached where packets from outside arrive
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

// Started reports that the first changes are being applied. Until they are in force
// ([Proxy.Applied]), the proxy is starting, and healthy however long that takes: a
// restart would only make it start from the beginning.
func (p *Proxy) Started() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updated = p.cfg.Now()
}

// Queued reports that there is a change to be applied.
func (p *Proxy) Queued() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queued = earliest(p.queued, p.cfg.Now())
}

// Taken reports that the queued changes are being applied now, or that other work has
// begun which must end in time. Repeated calls count as the first one.
func (p *Proxy) Taken() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.working = earliest(earliest(p.working, p.queued), p.cfg.Now())
	p.taken = earliest(p.taken, p.working)
	p.queued = time.Time{}
}

// Applied reports that all changes that were taken are in force, or that work on them
// proceeds in turns: one Service that takes long does not make the node unhealthy.
func (p *Proxy) Applied() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.updated = p.cfg.Now()
	p.applied = true
	p.taken, p.working = time.Time{}, time.Time{}
}

// NotApplied reports that changes that were taken cannot be put into force now, and will be tried again.
func (p *Proxy) NotApplied() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.working = time.Time{}
}

// Effective reports whether programs take effect.
func (p *Proxy) Effective(effective bool) { p.follow(&p.ineffective, effective) }

// Attached reports whether programs are attached where packets from outside arrive.
func (p *Proxy) Attached(attached bool) { p.follow(&p.detached, attached) }

// follow sets the time since which something is wrong, to zero if it is right.
func (p *Proxy) follow(since *time.Time, right bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if right {
		*since = time.Time{}
	} else {
		*since = earliest(*since, p.cfg.Now())
	}
}

// Healthy reports whether no change waits for too long, and programs take effect.
func (p *Proxy) Healthy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()

	return p.healthy(p.cfg.Now())
}

func (p *Proxy) healthy(now time.Time) bool {
	return p.alive(now) && p.inTime(now, earliest(p.taken, earliest(p.ineffective, p.detached)))
}

// alive reports whether changes are taken in time. If they are not, the goroutine that takes them hangs, which a
// restart mends. It does not mend what else may be wrong: a map that cannot be written, or a device to which nothing can
// be attached.
func (p *Proxy) alive(now time.Time) bool { return p.inTime(now, earliest(p.queued, p.working)) }

// inTime reports whether what has been so since then, zero if it is not, has not been for too long.
func (p *Proxy) inTime(now, since time.Time) bool {
	return !p.applied || since.IsZero() || now.Sub(since) < p.cfg.Timeout
}

// report returns the current state, by healthy or alive.
func (p *Proxy) report(well func(now time.Time) bool) report {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.cfg.Now()
	r := report{LastUpdated: p.updated, CurrentTime: now, Healthy: well(now)}
	if p.updated.IsZero() {
		return r
	}
	r.Status = make(map[string]familyReport, len(p.cfg.Families))
	for _, family := range p.cfg.Families {
		r.Status[family.String()] = familyReport{LastUpdated: p.updated, Healthy: r.Healthy}
	}

	return r
}

// earliest returns the earlier one of two times. A zero time does not count.
func earliest(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}

	return a
}

// Config configures a [Handler].
type Config struct {
	Proxy *Proxy
	// Eligible reports whether load balancers may send new connections to this
	// node: its Node exists and is not about to go (KEP-3836).
	Eligible func() bool
	// Ready returns why the proxy is not ready, nothing if it is.
	Ready func() []string
	// Observe is called with each answer at /healthz and /livez. It may be nil.
	Observe func(path string, code int)
}

// report is the body of /healthz and /livez: kube-proxy's names, in its order.
type report struct {
	LastUpdated  time.Time               `json:"lastUpdated"`
	CurrentTime  time.Time               `json:"currentTime"`
	NodeEligible *bool                   `json:"nodeEligible,omitempty"`
	Healthy      bool                    `json:"healthy"`
	Status       map[string]familyReport `json:"status,omitempty"` // by family
}

type familyReport struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Handler answers at /healthz, /livez and /readyz, whatever the method. Anything
// else is not found.
//
// The kubelet should ask for /livez, which fails only if a restart may help: the goroutine that takes changes
// hangs. Load balancers ask for /healthz, which fails also while changes cannot be put into force, programs have no effect,
// or the node is about to go.
func Handler(cfg Config) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		r := cfg.Proxy.report(cfg.Proxy.healthy)
		eligible := cfg.Eligible()
		r.NodeEligible = &eligible
		cfg.answer(w, "/healthz", r, r.Healthy && eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		r := cfg.Proxy.report(cfg.Proxy.alive)
		cfg.answer(w, "/livez", r, r.Healthy)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, r *http.Request) {
		body := struct {
			Ready   bool     `json:"ready"`
			Reasons []string `json:"reasons,omitempty"`
		}{Reasons: cfg.Ready()}
		body.Ready = len(body.Reasons) == 0
		if !isOfNode(r) {
			body.Reasons = nil
		}
		send(w, statusOf(body.Ready), body)
	})

	return mux
}

// isOfNode reports whether a client is on this node, and in its network namespace: it comes by loopback, or from the address
// that it asks. Reasons name devices, programs and paths, which are not for pods and clients elsewhere.
func isOfNode(r *http.Request) bool {
	client, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)

	return client.Addr().IsLoopback() || local != nil && local.AddrPort().Addr().Unmap() == client.Addr().Unmap()
}

func (cfg Config) answer(w http.ResponseWriter, path string, r report, healthy bool) {
	if healthy {
		// Scripts compare it with the clock, because older proxies wrote their rules
		// every few seconds.
		r.LastUpdated = r.CurrentTime
	}
	if cfg.Observe != nil {
		cfg.Observe(path, statusOf(healthy))
	}
	send(w, statusOf(healthy), r)
}

func statusOf(healthy bool) int {
	if healthy {
		return http.StatusOK
	}

	return http.StatusServiceUnavailable
}

// send answers with JSON, without a newline at its end.
func send(w http.ResponseWriter, code int, body any) {
	text, err := json.Marshal(body)
	if err != nil {
		code, text = http.StatusInternalServerError, nil
	}
	setHeaders(w.Header())
	w.WriteHeader(code)
	_, _ = w.Write(text) // the client may have gone
}

func setHeaders(header http.Header) {
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
}
