package metrics

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/component-base/metrics/legacyregistry"
	_ "k8s.io/component-base/metrics/prometheus/restclient" // rest_client_*
	"k8s.io/component-base/metrics/prometheus/slis"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/pkg/health"
)

// proxyMode is the answer at /proxyMode.
const proxyMode = "sluice"

// configzName is the name of kube-proxy's configuration in /configz.
const configzName = "kubeproxy.config.k8s.io"

// Server serves metrics, and the other paths that kube-proxy has at the same address, with
// kube-proxy's answers. Other paths are not found.
type Server struct {
	// Address is what to listen on. The zero value serves nothing.
	Address netip.AddrPort
	// HardFail makes an address that cannot be listened on an error. Listening is as in [health.Server].
	HardFail  bool
	Listening func(error)
	// Gatherers are served beside the registry of Kubernetes' packages, which has their
	// metrics and those of the Go runtime.
	Gatherers Gatherers
	// Profiling serves Go's profiles, and the path that changes the log's verbosity.
	Profiling bool
	// Configz is the configuration that /configz shows, nil for none.
	Configz any
	Log     *slog.Logger
}

// Run serves until ctx ends.
func (s Server) Run(ctx context.Context) error {
	return health.Server{
		Name: "metrics", Address: s.Address, Handler: s.handler(), HardFail: s.HardFail, Listening: s.Listening, Log: s.Log,
	}.Run(ctx)
}

func (s Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(append(s.Gatherers[:len(s.Gatherers):len(s.Gatherers)], legacyregistry.DefaultGatherer), promhttp.HandlerOpts{
		// A metric that cannot be read is left out, and all others are served.
		ErrorHandling: promhttp.ContinueOnError,
		ErrorLog:      slog.NewLogLogger(s.Log.Handler(), slog.LevelError),
	}))
	slis.SLIMetricsWithReset{}.Install(mux)
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, r *http.Request) {
		_ = slis.ObserveHealthcheck(r.Context(), "ping", "healthz", slis.Success)
		sendText(w, "ok")
	})
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) { sendText(w, proxyMode) })
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) { sendConfigz(w, s.Configz) })
	if s.Profiling {
		addProfiling(mux)
	}

	return mux
}

func sendText(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = io.WriteString(w, text) // the client may have gone
}

func sendConfigz(w http.ResponseWriter, config any) {
	configs := map[string]any{}
	if config != nil {
		configs[configzName] = config
	}
	text, err := json.Marshal(configs)
	if err != nil {
		http.Error(w, fmt.Sprintf("error marshaling json: %v", err), http.StatusInternalServerError)

		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(text)
}

func addProfiling(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/debug/pprof/", http.StatusFound)
	})
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/debug/flags/v", setVerbosity)
}

// setVerbosity sets klog's -v, which the agent's log follows.
func setVerbosity(w http.ResponseWriter, r *http.Request) {
	code, text := http.StatusNotAcceptable, "unsupported http method"
	if r.Method == http.MethodPut {
		code, text = http.StatusOK, ""
		level, err := io.ReadAll(io.LimitReader(r.Body, 64))
		if err == nil {
			var flags flag.FlagSet
			klog.InitFlags(&flags)
			err = flags.Set("v", string(level))
			text = "successfully set klog.logging.verbosity to " + string(level)
		}
		if err != nil {
			code, text = http.StatusBadRequest, err.Error()
		}
	}
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = fmt.Fprintln(w, text)
}
