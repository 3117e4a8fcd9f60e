package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// needEvents are selectors of what does not happen in this test, each with the event.
var needEvents = map[string]string{
	`sluice_map_mended_total`: "another program writes to a map",
}

// A Prometheus beside an agent gets series for each query of the dashboard, and for each
// selector of the alerts: no name or label of them is unknown to the agent. Of the alerts
// only those fire whose event is there.
//
//	client outside ── node-1 (agent, Prometheus) ─┬─ a pod that dials web and dead
//	                                              └─ pod-1-0: web; dead has no endpoints
func TestQueries(t *testing.T) {
	s := scene.MustSet(t, scene.Config{})
	node := s.Lab.Nodes[0]
	p := mustPrometheus(t, node)
	web := s.CreateService(t, "web", scene.NodePort)
	slice := s.Slice("web", discoveryv1.AddressTypeIPv4, scene.ReadyAll(s.Local()[0])...)
	slice.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().UTC().Format(time.RFC3339Nano)}
	s.PutSlice(t, slice)
	dead := s.CreateService(t, "dead")
	traffic := func() {
		scene.MustReach(t, s.Pod.To("tcp", scene.At(web.Spec.ClusterIPs[0], 80)), s.Local()[0].Name)
		scene.MustReach(t, s.Outside.To("tcp", scene.At(node.IPv4.String(), web.Spec.Ports[0].NodePort)), s.Local()[0].Name)
		scene.MustFail(t, s.Pod.To("tcp", scene.At(dead.Spec.ClusterIPs[0], 80)), scene.Rejected)
	}
	traffic()
	p.mustGet(t, `sluice_service_failures_total{service="dead"} > 0`)
	traffic() // what is counted between two scrapes makes a rate

	for where, query := range mustQueries(t) {
		t.Run(where, func(t *testing.T) { p.mustGet(t, query) })
	}
	for _, alert := range mustRules(t) {
		t.Run(alert.Alert, func(t *testing.T) {
			if _, err := p.query(alert.Expr); err != nil {
				t.Error(err)
			}
			for _, selector := range selectors(alert.Expr) {
				if _, ok := needEvents[selector]; !ok {
					p.mustGet(t, selector)
				}
			}
		})
	}
	p.mustGet(t, `ALERTS{alertname="SluiceServiceWithoutBackends"}`)
	fires, err := p.query(`count by (alertname) (ALERTS)`)
	lab.Must(t, err)
	if want := "[map[alertname:SluiceServiceWithoutBackends]]"; fmt.Sprint(fires) != want {
		t.Errorf("the alerts are %v, want %s", fires, want)
	}
}

// selector is a metric of the agent, with its labels.
var selector = regexp.MustCompile(`\b(up|(sluice|kubeproxy|process|rest_client)_\w+)(\{[^}]*\})?`)

func selectors(expr string) []string { return slices.Compact(selector.FindAllString(expr, -1)) }

// mustQueries returns the queries of the dashboard by panel, as Grafana sends them when
// every variable is All.
func mustQueries(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(folder + "dashboard.json")
	lab.Must(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	lab.Must(t, json.Unmarshal(text, &dashboard))
	variables := strings.NewReplacer("$__rate_interval", "1m", "$instance", ".*", "$namespace", ".*", "$service", ".*")
	all := make(map[string]string)
	for _, panel := range dashboard.Panels {
		for i, target := range panel.Targets {
			expr := variables.Replace(target.Expr)
			if strings.Contains(expr, "$") {
				t.Errorf("%s: %s has a variable that is not known", panel.Title, expr)
			}
			all[fmt.Sprintf("%s, %d", panel.Title, i+1)] = expr
		}
	}
	if len(all) < 15 {
		t.Fatalf("the dashboard has only %d queries", len(all))
	}

	return all
}
