package doctor

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/node"
)

// mustServe is an API server, which answers with a status and a body, and whose clock is ahead.
func mustServe(t testing.TB, status int, body string, ahead time.Duration) *httptest.Server {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := body
		switch r.URL.String() {
		case "/api/v1/namespaces/default/services?fieldSelector=metadata.name=kubernetes":
		case "/apis/networking.k8s.io/v1/servicecidrs":
			answer = `{"items": [{"spec": {"cidrs": ["127.0.0.0/30", "fd00:96::/112"]}}]}`
		case "/api/v1/nodes?limit=500":
			answer = `{"items": [{"metadata": {"name": "node-7"}, "spec": {"podCIDRs": ["fd00:96::/64"]}}]}`
		case "/api/v1/nodes/node-7":
			answer = `{"spec": {"podCIDRs": ["fd00:96::/64"]}, "status": {"addresses": [{"type": "Hostname", "address": "node-7"},
				{"type": "ExternalIP", "address": "203.0.113.7"}, {"type": "InternalIP", "address": "192.168.50.7"}, {"type": "ExternalIP", "address": "2001:db8::7"}]}}`
		default:
			t.Errorf("asked is for %s", r.URL)
		}
		w.Header().Set("Date", time.Now().Add(ahead).UTC().Format(http.TimeFormat))
		w.WriteHeader(status)
		_, _ = w.Write([]byte(answer)) // the client may have gone
	}))
	t.Cleanup(server.Close)

	return server
}

// A real TLS client finds what the checks report.
func TestAskAPIServer(t *testing.T) {
	const own = `{"items": [{"spec": {"clusterIPs": ["10.96.0.1", "127.0.0.1"]}}]}`
	for _, test := range []struct {
		name       string
		status     int
		body       string
		ahead      time.Duration
		change     func(*Config)
		api, clock string
	}{
		{"which is well", 200, `{"items": [{"spec": {"clusterIPs": ["10.96.0.1"]}}]}`, 0, nil, "ok: https://127.0.0.1", "ok"},
		{"which refuses to list", 403, `{"kind": "Status"}`, 0, nil, "ok: https://127.0.0.1", "ok"},
		{"by its ClusterIP", 200, own, 0, nil, "warning: https://127.0.0.1", "ok"},
		{"which does not know the client", 401, "", 0, nil, "problem: https://127.0.0.1", "ok"},
		{"whose clock is ahead", 200, own, time.Hour, nil, "warning: ", "problem: this node's clock is 1h0m0s behind the API server's"},
		{"of an unknown authority", 200, own, 0, func(c *Config) { c.Client = http.DefaultClient }, "problem: https://127.0.0.1", "warning"},
		{"of another name", 200, own, 0, func(c *Config) {
			c.APIServer = strings.Replace(c.APIServer, "127.0.0.1", "localhost", 1)
		}, "problem: https://localhost", "warning"},
	} {
		t.Run(test.name, func(t *testing.T) {
			server := mustServe(t, test.status, test.body, test.ahead)
			cfg := Config{APIServer: server.URL, Client: server.Client(), Model: node.ModelConfig{NodeName: "node-7"}}
			if test.change != nil {
				test.change(&cfg)
			}
			n := Node{APIServer: look(func() (APIServer, error) { return askAPIServer(t.Context(), cfg) })}
			api, clock, cidrs := checkAPIServer(n)[0], checkClock(n)[0], checkServiceCIDRs(n)[0]
			if test.status == 200 && test.change == nil && !strings.Contains(cidrs.Seen, "podCIDR fd00:96::/64 of node node-7 overlaps fd00:96::/112") {
				t.Errorf("ServiceCIDRs: %q", cidrs.Seen)
			}
			if ips := fmt.Sprint(n.APIServer.Value.SelfIPs); test.status == 200 && test.change == nil && ips != "[192.168.50.7 2001:db8::7]" {
				t.Errorf("the Node's primary addresses are %s", ips)
			}
			if test.status != 200 && cidrs.State != Warning {
				t.Errorf("ServiceCIDRs that this client may not list: %s: %s", cidrs.State, cidrs.Seen)
			}
			if got := string(api.State) + ": " + api.Seen; !strings.HasPrefix(got, test.api) {
				t.Errorf("API server: %q, want %q", got, test.api)
			}
			if got := string(clock.State) + ": " + clock.Seen; !strings.HasPrefix(got, test.clock) {
				t.Errorf("clock: %q, want %q", got, test.clock)
			}
			authority := strings.Contains(api.Seen, "signed by an authority that the kubeconfig does not have")
			name := strings.Contains(api.Seen, "for other names than localhost: example.com")
			if authority != (test.name == "of an unknown authority") || name != (test.name == "of another name") {
				t.Errorf("the certificate's error is %q", api.Seen)
			}
		})
	}
}

// This process is seen as the kernel has it.
func TestObserve(t *testing.T) {
	n := Observe(t.Context(), Config{BPFRoot: t.TempDir(), Socket: "/none"})
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if n.Kernel.Value.Release != strings.TrimSpace(string(release)) || n.Kernel.Value.Version.Major < 4 {
		t.Errorf("the kernel is %+v, want %s", n.Kernel.Value, release)
	}
	if n.BPFFS == nil {
		t.Error("a temporary folder is on bpffs")
	}
	if n.Memory.Err != nil || n.Memory.Value.Free < 1<<20 || n.Memlock.Err != nil || n.JIT.Err != nil {
		t.Errorf("memory %+v, memlock %+v, JIT %+v", n.Memory, n.Memlock, n.JIT)
	}
	if os.Geteuid() == 0 && !n.Process.Value.has("NET_ADMIN") {
		t.Errorf("root has the capabilities %#x", n.Process.Value.Capabilities)
	}
}
