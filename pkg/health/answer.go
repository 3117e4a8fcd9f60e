package health

import (
	"encoding/json"
	"net/http"
	"time"
)

// Config says what a [Handler] tells.
type Config struct {
	Proxy *Proxy
	// Eligible says whether load balancers may send new connections to this
	// node: its Node exists and is not about to go (KEP-3836).
	Eligible func() bool
	// Ready says why the proxy is not ready, or nothing.
	Ready func() []string
	// Observe, unless it is nil, is told of each answer at /healthz and /livez.
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

func (cfg Config) answer(w http.ResponseWriter, path string, r report, well bool) {
	if well {
		// Scripts hold it against the clock, from when rules were written every
		// few seconds.
		r.LastUpdated = r.CurrentTime
	}
	if cfg.Observe != nil {
		cfg.Observe(path, statusOf(well))
	}
	send(w, statusOf(well), r)
}

func statusOf(well bool) int {
	if well {
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
	_, _ = w.Write(text) // whoever asked may have gone
}

func setHeaders(header http.Header) {
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
}
