package realproxy

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// kube-proxy's health has a timestamp of IPv4 from the beginning. Only its metrics show that all
// is programmed, and they are read only after the timestamp has changed.
func TestSyncCheck(t *testing.T) {
	ns := lab.MustNamespace(t, "syncCheck")
	var updated, metrics string
	asked := 0
	mustPublish(t, ns, "127.0.0.1:10256", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"lastUpdated":"now","healthy":true,"status":{%s}}`, updated)
	})
	mustPublish(t, ns, "127.0.0.1:10249", func(w http.ResponseWriter, _ *http.Request) {
		asked++
		fmt.Fprint(w, metrics)
	})
	c := syncCheck{ns: ns}
	const gauge = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
	none := gauge + "{ip_family=\"IPv4\"} 0\n" + gauge + "{ip_family=\"IPv6\"} 1.7e+09\n"
	once := gauge + "{ip_family=\"IPv4\"} 1.7e+09\n" + gauge + "{ip_family=\"IPv6\"} 0\n"
	for _, step := range []struct {
		name, updated, metrics string
		asked                  int
		synced                 bool
	}{
		{"starting", ``, none, 0, false},
		{"begun", `"IPv4":{"lastUpdated":"1"}`, none, 1, false},
		{"unchanged", `"IPv4":{"lastUpdated":"1"}`, none, 1, false},
		{"IPv6 only", `"IPv4":{"lastUpdated":"1"},"IPv6":{"lastUpdated":"2"}`, none, 1, false},
		{"done", `"IPv4":{"lastUpdated":"3"}`, once, 2, true},
	} {
		updated, metrics = step.updated, step.metrics
		if err := c.once(); (err == nil) != step.synced || err != nil && !errors.Is(err, errNoSync) || asked != step.asked {
			t.Errorf("%s: the answer is %v after %d requests for metrics, want %t after %d",
				step.name, err, asked, step.synced, step.asked)
		}
	}
}

func mustPublish(t *testing.T, ns *lab.Namespace, address string, page http.HandlerFunc) {
	t.Helper()
	listener, err := ns.Listen("tcp", address)
	lab.Must(t, err)
	server := &http.Server{Handler: page}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
}
