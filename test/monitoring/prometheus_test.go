package monitoring

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// prometheus is Debian's, on the loopback device of a node.
type prometheus struct{ http.Client }

const configuration = `
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%s]
scrape_configs:
- job_name: sluice
  static_configs: [{targets: ["127.0.0.1:10249"], labels: {instance: node-1}}]
`

// mustPrometheus starts one that scrapes the agent of the node, and loads the alerts. It
// ends with the test.
func mustPrometheus(t *testing.T, node *lab.Node) *prometheus {
	t.Helper()
	rules, err := filepath.Abs(folder + "rules.yaml")
	lab.Must(t, err)
	data := t.TempDir()
	file := filepath.Join(data, "prometheus.yaml")
	lab.Must(t, os.WriteFile(file, fmt.Appendf(nil, configuration, rules), 0o600))
	cmd := exec.Command("prometheus", "--config.file="+file, "--storage.tsdb.path="+data,
		"--enable-feature=native-histograms", "--web.listen-address=127.0.0.1:9090")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	lab.Must(t, lab.Start(node.Namespace, lab.MustCgroup(t, "prometheus"), cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		if t.Failed() {
			lab.KeepLog(t, "prometheus", log.String())
		}
	})
	dial := func(_ context.Context, network, address string) (net.Conn, error) {
		return node.Dial(network, address, 5*time.Second)
	}
	p := &prometheus{http.Client{Transport: &http.Transport{DialContext: dial}, Timeout: 10 * time.Second}}
	p.mustGet(t, `up{job="sluice"} == 1`)

	return p
}

// query returns the series that an expression has now.
func (p *prometheus) query(expr string) ([]map[string]string, error) {
	answer, err := p.PostForm("http://127.0.0.1:9090/api/v1/query", url.Values{"query": {expr}})
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var result struct {
		Error string
		Data  struct {
			Result []struct{ Metric map[string]string }
		}
	}
	if err := json.NewDecoder(answer.Body).Decode(&result); err != nil {
		return nil, fmt.Errorf("%s: %w", answer.Status, err)
	}
	if result.Error != "" {
		return nil, fmt.Errorf("%s: %s", result.Error, expr)
	}
	var series []map[string]string
	for _, one := range result.Data.Result {
		series = append(series, one.Metric)
	}

	return series, nil
}

// mustGet waits until an expression has series: those of Services are counted each 5 s.
func (p *prometheus) mustGet(t *testing.T, expr string) {
	t.Helper()
	lab.Eventually(t, "series of "+expr, func() error {
		series, err := p.query(expr)
		if err == nil && len(series) == 0 {
			err = fmt.Errorf("none")
		}

		return err
	})
}
