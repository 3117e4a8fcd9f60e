package metrics

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	clientmetrics "k8s.io/client-go/tools/metrics"
	"k8s.io/klog/v2"

	"github.com/sluice-lb/sluice/test/lab"
)

// answered is an answer, as far as clients can rely on it.
type answered struct {
	Code    int
	Type    string
	NoSniff bool
	Body    string
}

func asked(t *testing.T, handler http.Handler, method, path, body string) answered {
	t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))

	return answered{
		Code: w.Code, Type: w.Header().Get("Content-Type"),
		NoSniff: w.Header().Get("X-Content-Type-Options") == "nosniff", Body: w.Body.String(),
	}
}

func testServer() Server {
	return Server{
		Log:       slog.New(slog.DiscardHandler),
		Profiling: true,
		Configz:   map[string]string{"kind": "KubeProxyConfiguration"},
	}
}

const plain, utf8 = "text/plain", "text/plain; charset=utf-8"

// The answers are kube-proxy's, byte by byte. There is nothing else.
func TestMetricsServerAnswers(t *testing.T) {
	handler := testServer().handler()
	notFound := answered{404, utf8, true, "404 page not found\n"}
	for _, test := range []struct {
		method, path string
		want         answered
	}{
		{"GET", "/healthz", answered{200, utf8, true, "ok"}},
		{"GET", "/proxyMode", answered{200, utf8, true, "sluice"}},
		{"GET", "/configz", answered{200, "application/json", true, `{"kubeproxy.config.k8s.io":{"kind":"KubeProxyConfiguration"}}`}},
		{"GET", "/", notFound},
		{"GET", "/healthz/x", notFound},
		{"GET", "/livez", notFound},
		{"GET", "/readyz", notFound},
		{"GET", "/flagz", notFound},
		{"GET", "/statusz", notFound},
		{"GET", "/metrics/", notFound},
		{"GET", "/debug/flags", notFound},
	} {
		if diff := cmp.Diff(test.want, asked(t, handler, test.method, test.path, "")); diff != "" {
			t.Errorf("%s %s (-want +got):\n%s", test.method, test.path, diff)
		}
	}
	server := testServer()
	server.Configz = nil
	if got := asked(t, server.handler(), "GET", "/configz", ""); got.Body != "{}" {
		t.Errorf("without a configuration, /configz is %q", got.Body)
	}
}

// Profiles and the log's verbosity are there if they are wanted.
func TestProfiling(t *testing.T) {
	server := testServer()
	handler := server.handler()
	server.Profiling = false
	without := server.handler()
	for path, code := range map[string]int{
		"/debug/pprof": 302, "/debug/pprof/": 200, "/debug/pprof/heap": 200, "/debug/pprof/goroutine?debug=1": 200,
		"/debug/pprof/symbol": 200, "/debug/pprof/nothing": 404,
		"/debug/flags/v": 406,
	} {
		if got := asked(t, handler, "GET", path, ""); got.Code != code {
			t.Errorf("%s: %d, want %d", path, got.Code, code)
		}
		if got := asked(t, without, "GET", path, ""); got.Code != 404 {
			t.Errorf("%s without profiling: %d", path, got.Code)
		}
	}
}

// A level is put where klog keeps it, which the agent's log follows.
func TestVerbosity(t *testing.T) {
	handler := testServer().handler()
	put := func(level string) answered { return asked(t, handler, "PUT", "/debug/flags/v", level) }
	t.Cleanup(func() { put("0") })
	want := answered{200, plain, true, "successfully set klog.logging.verbosity to 7\n"}
	if diff := cmp.Diff(want, put("7")); diff != "" || !klog.V(7).Enabled() || klog.V(8).Enabled() {
		t.Errorf("7 was put; V(7) is %v, V(8) is %v (-want +got):\n%s", klog.V(7).Enabled(), klog.V(8).Enabled(), diff)
	}
	if got := put("loud"); got.Code != 400 || !strings.Contains(got.Body, "loud") || !klog.V(7).Enabled() {
		t.Errorf("loud was put: %v", got)
	}
	want = answered{406, plain, true, "unsupported http method\n"}
	if diff := cmp.Diff(want, asked(t, handler, "GET", "/debug/flags/v", "")); diff != "" {
		t.Errorf("nothing was put (-want +got):\n%s", diff)
	}
}

// /metrics has the metrics of every registry that does not fail.
func TestMetricsOfAllRegistries(t *testing.T) {
	broken := gathererFunc(func() ([]*dto.MetricFamily, error) { return nil, errors.New("no") })
	own, err := NewRegistry(NewSync(time.Now))
	lab.Must(t, err)
	clientmetrics.EnsureRegistered() // as the first client does
	server := testServer()
	server.Gatherers = Gatherers{own, broken}
	handler := server.handler()
	got := asked(t, handler, "GET", "/metrics", "")
	if got.Code != 200 || !strings.HasPrefix(got.Type, "text/plain; version=0.0.4; charset=utf-8") {
		t.Errorf("the answer is %d, %s", got.Code, got.Type)
	}
	for _, name := range []string{
		"kubeproxy_sync_proxy_rules_endpoint_changes_total 0", "go_goroutines ", "process_cpu_seconds_total ",
		"rest_client_transport_cache_entries ",
	} {
		if !strings.Contains(got.Body, "\n"+name) {
			t.Errorf("there is no %s", name)
		}
	}
}

type gathererFunc func() ([]*dto.MetricFamily, error)

func (f gathererFunc) Gather() ([]*dto.MetricFamily, error) { return f() }

// /metrics/slis counts how /healthz was answered, as kube-proxy's does.
func TestSLIs(t *testing.T) {
	handler := testServer().handler()
	asked(t, handler, "GET", "/healthz", "")
	got := asked(t, handler, "GET", "/metrics/slis", "")
	if want := `kubernetes_healthcheck{name="ping",type="healthz"} 1`; !strings.Contains(got.Body, want) {
		t.Errorf("there is no %s in %d %s", want, got.Code, got.Body)
	}
}

// The agent answers at its configured address, waits for one that another program
// has, and ends instead if it is configured so.
func TestMetricsServerListens(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	lab.Must(t, err)
	server := testServer()
	server.Address = netip.MustParseAddrPort(taken.Addr().String())
	server.HardFail = true
	if err := server.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "metrics at "+taken.Addr().String()) {
		t.Errorf("the address is taken, and the error is %v", err)
	}
	lab.Must(t, taken.Close())

	end := lab.MustRun(t, server.Run)
	if body := mustGet(t, fmt.Sprintf("http://%s/proxyMode", server.Address)); body != proxyMode {
		t.Errorf("/proxyMode is %q", body)
	}
	end()

	server.Address = netip.AddrPort{}
	if err := server.Run(t.Context()); err != nil {
		t.Errorf("with no address: %v", err)
	}
}

// mustGet asks until there is an answer.
func mustGet(t *testing.T, url string) string {
	t.Helper()
	var response *http.Response
	lab.Eventually(t, "an answer of "+url, func() (err error) {
		response, err = http.Get(url)

		return err
	})
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	lab.Must(t, err)

	return string(body)
}
