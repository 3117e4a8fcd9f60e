package health

import (
	"encoding/json"
	"net/http"
	"time"
)

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

// readiness is the body of /readyz.
type readiness struct {
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons,omitempty"`
}

// Handler answers at /healthz, /livez and /readyz, whatever the method. Anything
// else is not found.
//
// The kubelet should ask for /livez: a node that is about to go is no reason to
// restart its proxy. Load balancers ask for /healthz.
func Handler(cfg Config) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		r := cfg.Proxy.report()
		eligible := cfg.Eligible()
		r.NodeEligible = &eligible
		cfg.answer(w, "/healthz", r, r.Healthy && eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		r := cfg.Proxy.report()
		cfg.answer(w, "/livez", r, r.Healthy)
	})
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		reasons := cfg.Ready()
		send(w, statusOf(len(reasons) == 0), readiness{Ready: len(reasons) == 0, Reasons: reasons})
	})

	return mux
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
