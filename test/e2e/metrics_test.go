package e2e

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

const metricsAddress = "127.0.0.1:10249" // kube-proxy's, and the default

// series are the values of a scrape, by name and labels.
type series map[string]float64

var sample = regexp.MustCompile(`(?m)^([a-z_]+(?:\{[^\n]*\})?) ([-+.0-9a-zA-Z]+)$`)

func (s *testbed) scrape(t testing.TB) series {
	t.Helper()
	got := mustAnswer(t, in(s.Lab.Nodes[0].Namespace), metricsAddress, "/metrics", 200)
	values := make(series)
	for _, match := range sample.FindAllStringSubmatch(got.body, -1) {
		value, err := strconv.ParseFloat(match[2], 64)
		lab.Must(t, err)
		values[match[1]] = value
	}

	return values
}

// countsAge is how long the counts of Services that a scrape shows may be old, and
// much more.
const countsAge = 3 * waitTimeout

// mustMeasure waits until a series has a value.
func (s *testbed) mustMeasure(t testing.TB, name string, want float64) {
	t.Helper()
	lab.EventuallyIn(t, countsAge, fmt.Sprintf("%s is %v", name, want), func() error {
		if got, ok := s.scrape(t)[name]; !ok || got != want {
			return fmt.Errorf("it is %v (%t)", got, ok)
		}

		return nil
	})
}

// What kube-proxy answers at its metrics address is answered, and there is every
// metric that the docs promise of an agent without failures.
func TestMetrics(t *testing.T) {
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent, "--profiling", "--healthz-bind-address=127.0.0.1:10256")
	local := in(s.Lab.Nodes[0].Namespace)
	for _, test := range []struct {
		path string
		code int
		body string
	}{
		{"/healthz", 200, "ok"},
		{"/proxyMode", 200, "sluice"},
		{"/configz", 200, `"kind":"KubeProxyConfiguration"`},
		{"/configz", 200, `"apiVersion":"kubeproxy.config.k8s.io/v1alpha1"`},
		{"/metrics/slis", 200, `kubernetes_healthcheck{name="ping",type="healthz"} 1`},
		{"/debug/pprof/goroutine?debug=1", 200, "goroutine profile"},
		{"/debug/flags/v", 406, ""},
		{"/flagz", 404, ""},
		{"/statusz", 404, ""},
		{"/livez", 404, ""},
		{"/", 404, ""},
	} {
		mustAnswer(t, local, metricsAddress, test.path, test.code, test.body)
	}
	mustAnswer(t, local, "127.0.0.1:10256", "/healthz", 200)
	mustAnswer(t, local, "127.0.0.1:10256", "/livez", 200)

	values := s.scrape(t)
	for name, want := range map[string]float64{
		`kubeproxy_proxy_healthz_total{code="200"}`:                                1,
		`kubeproxy_proxy_livez_total{code="200"}`:                                  1,
		`kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"}`: 1,
		`kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv6"}`: 1,
		`kubernetes_feature_enabled{name="AllowServiceExternalIPs",stage=""}`:      1,
		`kubernetes_feature_enabled{name="MultiCIDRServiceAllocator",stage=""}`:    1,
		`sluice_synced`: 1, `sluice_hooks_effective`: 1, `sluice_hook_attached{hook="connect4"}`: 1, `sluice_device_problems`: 0,
	} {
		if got, ok := values[name]; !ok || got != want {
			t.Errorf("%s is %v (%t), want %v", name, got, ok, want)
		}
	}
	for _, name := range append(documented(t),
		"go_goroutines", "process_cpu_seconds_total", "rest_client_requests_total", "rest_client_request_duration_seconds_bucket",
		"kubernetes_build_info", "registered_metrics_total", "hidden_metrics_total", "disabled_metrics_total",
		"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
	) {
		if !values.has(name) {
			t.Errorf("there is no %s", name)
		}
	}
	for name := range values {
		if strings.HasPrefix(name, "apiserver_") || strings.HasPrefix(name, "aggregator_") {
			t.Errorf("there is %s", name)
		}
	}
}

func (s series) has(name string) bool {
	for n := range s {
		if n == name || strings.HasPrefix(n, name+"{") {
			return true
		}
	}

	return false
}

// needEvents are the metrics that an agent without connections, failures and --backend-metrics does
// not have; TestServiceMetrics has most of them.
var needEvents = regexp.MustCompile("^sluice_(service_(failures|hidden_refusals|handshake|syn_|retransmits)|backend_|map_mended)")

// documented returns the names in docs/metrics.md, but for those in needEvents.
func documented(t testing.TB) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/metrics.md")
	lab.Must(t, err)
	var names []string
	for _, match := range regexp.MustCompile("(?m)^\\| `(sluice_[a-z_]+)`").FindAllStringSubmatch(string(text), -1) {
		if !needEvents.MatchString(match[1]) {
			names = append(names, match[1])
		}
	}
	if len(names) < 20 {
		t.Fatalf("docs/metrics.md has only %v", names)
	}

	return names
}

// Latency is measured from the annotation of a slice, but not from an invalid one, nor
// from one that is older than the agent.
func TestNetworkProgrammingLatency(t *testing.T) {
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent)
	s.CreateService(t, "web")
	const count = `kubeproxy_network_programming_duration_seconds_count{ip_family="IPv4"}`
	write := func(trigger string, endpoints ...scene.Endpoint) {
		t.Helper()
		slice := s.Slice("web", discoveryv1.AddressTypeIPv4, endpoints...)
		slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: trigger}
		s.PutSlice(t, slice)
	}
	pods := s.pods()
	now := func() string { return time.Now().UTC().Format(time.RFC3339Nano) }
	write("yesterday", scene.ReadyAll(pods[:1]...)...)
	write(time.Now().Add(-time.Hour).UTC().Format(time.RFC3339Nano), scene.ReadyAll(pods[:2]...)...)
	begin := time.Now()
	write(now(), scene.ReadyAll(pods[:3]...)...)
	s.mustMeasure(t, count, 1)
	write(now(), scene.ReadyAll(pods[:3]...)...) // the same endpoints
	write(now(), scene.ReadyAll(pods[:2]...)...)
	s.mustMeasure(t, count, 2)
	values := s.scrape(t)
	sum := values[strings.Replace(count, "_count", "_sum", 1)]
	if limit := 2 * time.Since(begin).Seconds(); sum <= 0 || sum > limit {
		t.Errorf("latencies come to %v seconds, want more than none and at most %v", sum, limit)
	}
	if values.has(`kubeproxy_network_programming_duration_seconds_count{ip_family="IPv6"}`) {
		t.Error("IPv6 has a latency, though there was no such slice")
	}
	if n := values["kubeproxy_sync_proxy_rules_endpoint_changes_total"]; n < 5 {
		t.Errorf("%v EndpointSlices were heard of, want at least 5", n)
	}
}

// Each Service has its own counts: of connections that got a backend, by what
// failed, of bytes, and of connections that there are.
//
//	web:80 ── pod-1-0    dead:80 (no endpoints)
func TestServiceMetrics(t *testing.T) {
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent, "--backend-metrics=10")
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	dead := scene.At(s.CreateService(t, "dead").Spec.ClusterIPs[0], 80)
	name := func(what, service, more string) string {
		return fmt.Sprintf(`sluice_service_%s{namespace="%s",%sservice="%s"}`, what, s.Namespace, more, service)
	}
	scene.MustFail(t, s.Pod.To("tcp", dead), scene.Rejected)
	socket, err := s.Pod.Socket("tcp4")
	lab.Must(t, err)
	lab.Must(t, socket.SetTimeout(waitTimeout))
	lab.Eventually(t, "web answers", func() bool { return socket.Connect(web) == nil })
	s.mustMeasure(t, name("active_connections", "web", ""), 1)
	s.mustMeasure(t, name("connections_total", "web", ""), 1)
	lab.Must(t, socket.Close())
	_, err = s.Pod.Request("tcp", web)
	lab.Must(t, err)
	s.mustMeasure(t, name("connections_total", "web", ""), 2)
	s.mustMeasure(t, name("active_connections", "web", ""), 0)
	s.mustMeasure(t, name("connections_total", "dead", ""), 0)
	traces, err := bpf.KnowsTracing()
	lab.Must(t, err)
	if traces {
		s.mustMeasure(t, name("handshake_seconds_count", "web", ""), 2)
		s.mustMeasure(t, name("handshake_failures_total", "web", ""), 0)
		backend := fmt.Sprintf(`sluice_backend_handshakes_total{backend="%s",namespace="%s",port="tcp",service="web"}`,
			pod.At(scene.PodPort)[0], s.Namespace)
		s.mustMeasure(t, backend, 2)
	}
	for _, grows := range []string{
		name("sent_bytes_total", "web", ""), name("received_bytes_total", "web", ""),
		name("failures_total", "dead", `reason="reject_no_backend",`),
	} {
		lab.EventuallyIn(t, countsAge, grows+" is not zero", func() bool { return s.scrape(t)[grows] > 0 })
	}
	if n := s.scrape(t)[name("sent_bytes_total", "dead", "")]; n != 0 {
		t.Errorf("%v bytes were sent to no backend", n)
	}

	s.DeleteService(t, "web")
	lab.EventuallyIn(t, countsAge, "web has no series any more", func() bool {
		return !s.scrape(t).has(name("connections_total", "web", ""))
	})
}
