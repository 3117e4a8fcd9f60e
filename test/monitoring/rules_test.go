package monitoring

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/sluice-lb/sluice/test/golden"
	"github.com/sluice-lb/sluice/test/lab"
)

type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

// mustRules returns the alerts.
func mustRules(t *testing.T) []rule {
	t.Helper()
	text, err := os.ReadFile(folder + "rules.yaml")
	lab.Must(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	lab.Must(t, yaml.UnmarshalStrict(text, &file))
	var all []rule
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	if len(all) < 15 {
		t.Fatalf("there are only %d alerts", len(all))
	}

	return all
}

// promtool runs the tests in testdata/alerts.yaml, which show when each alert fires.
func TestAlerts(t *testing.T) {
	lab.LookAtProduct(t)
	for _, args := range [][]string{
		{"check", "rules", "--lint=all", "--lint-fatal", folder + "rules.yaml"},
		{"test", "rules", "testdata/alerts.yaml"},
	} {
		if out, err := exec.Command("promtool", args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v:\n%s", strings.Join(args, " "), err, out)
		}
	}
	tests, err := os.ReadFile("testdata/alerts.yaml")
	lab.Must(t, err)
	for _, alert := range mustRules(t) {
		if !regexp.MustCompile(`alertname: ` + alert.Alert + `\n(?s:.{1,60})exp_alerts:\n`).Match(tests) {
			t.Errorf("no test in testdata/alerts.yaml has %s fire", alert.Alert)
		}
	}
}

// Each alert says what is the matter, how bad it is, and where its runbook is.
func TestRunbooks(t *testing.T) {
	page, err := os.ReadFile("../../docs/operate.md")
	lab.Must(t, err)
	const base = "https://github.com/sluice-lb/sluice/blob/main/docs/operate.md#"
	var names []string
	for _, alert := range mustRules(t) {
		names = append(names, alert.Alert)
		if alert.Annotations["summary"] == "" || alert.Annotations["description"] == "" ||
			!slices.Contains([]string{"critical", "warning"}, alert.Labels["severity"]) {
			t.Errorf("%s lacks a summary, a description or a severity", alert.Alert)
		}
		if got, want := alert.Annotations["runbook_url"], base+strings.ToLower(alert.Alert); got != want {
			t.Errorf("the runbook of %s is %s, want %s", alert.Alert, got, want)
		}
	}
	var headings []string
	for _, found := range regexp.MustCompile(`(?m)^### (Sluice\w+)$`).FindAllStringSubmatch(string(page), -1) {
		headings = append(headings, found[1])
	}
	if !slices.Equal(names, headings) {
		t.Errorf("docs/operate.md has the sections\n%q, want those of the alerts, in their order:\n%q", headings, names)
	}
}

// The configuration that docs/operate.md shows is one of Prometheus.
func TestOperate(t *testing.T) {
	page, err := os.ReadFile("../../docs/operate.md")
	lab.Must(t, err)
	_, shown, _ := strings.Cut(string(page), "```yaml\n# prometheus.yml\n")
	shown, _, _ = strings.Cut(shown, "```")
	// Debian's is built without Kubernetes.
	shown = strings.Replace(shown, "kubernetes_sd_configs:\n  - role: node\n", "static_configs:\n  - targets: [node-1]\n", 1)
	file := filepath.Join(t.TempDir(), "prometheus.yml")
	lab.Must(t, os.WriteFile(file, []byte(shown), 0o600))
	if out, err := exec.Command("promtool", "check", "config", "--syntax-only", file).CombinedOutput(); err != nil || shown == "" {
		t.Errorf("promtool check config: %v: %s", err, out)
	}
}

const prometheusRule = `# Made of rules.yaml: go test ./test/monitoring -run TestPrometheusRule -update
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: sluice
  labels:
    app.kubernetes.io/name: sluice
spec:
`

// The operator's object has the alerts of rules.yaml.
func TestPrometheusRule(t *testing.T) {
	rules, err := os.ReadFile(folder + "rules.yaml")
	lab.Must(t, err)
	_, groups, _ := strings.Cut(string(rules), "groups:\n")
	made := prometheusRule + "  groups:\n"
	for line := range strings.Lines(groups) {
		if line != "\n" {
			line = "  " + line
		}
		made += line
	}
	golden.Match(t, folder+"prometheusrule.yaml", made)
}
