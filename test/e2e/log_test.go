package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/sluice"
)

var lostLines = regexp.MustCompile(`(?m)^sluice_log_lines_lost_total (.*)$`)

// The reader of the agent's log hangs, as a container runtime does whose disk is full, and then ends. The agent goes on, and
// counts the lines that were not read.
func TestNobodyReadsTheLog(t *testing.T) {
	reader, log, err := os.Pipe()
	lab.Must(t, err)
	defer reader.Close()
	node, manifests := lab.MustNamespace(t, "node"), t.TempDir()
	agent := sluice.MustNode(t, sluice.Config{
		Namespace: node, Cgroup: lab.MustCgroup(t, "e2e"), Manifests: manifests, Log: log,
	})
	lab.Must(t, log.Close()) // the agent has it
	// mustServe adds Services with more problems than a pipe has room for.
	mustServe := func(when string, third int) {
		t.Helper()
		var text strings.Builder
		for i := range 200 {
			ip := fmt.Sprintf("10.96.%d.%d", third, i+1)
			svc := object.Service("lab", fmt.Sprintf("web-%d-%d", third, i), []string{ip}, corev1.ServicePort{Port: 80, Protocol: corev1.ProtocolTCP})
			svc.Annotations = map[string]string{"sluice-lb.io/algorithm": strings.Repeat("x", 400)}
			one, err := object.Manifest(svc)
			lab.Must(t, err)
			text.WriteString(string(one) + "\n---\n")
		}
		lab.Must(t, os.WriteFile(filepath.Join(manifests, fmt.Sprint(third, ".yaml")), []byte(text.String()), 0o644))
		lab.Eventually(t, "new Services are programmed "+when, func() error {
			out, err := agent.Run("services")
			if last := fmt.Sprintf("10.96.%d.200:80", third); err == nil && !strings.Contains(out, last) {
				err = fmt.Errorf("%s is not there", last)
			}
			return err
		})
	}
	for third := range 3 {
		mustServe("while the log is not read", third)
	}
	lab.Must(t, reader.Close())
	mustServe("after the reader of the log has gone", 3)
	lab.Eventually(t, "lines are lost", func() error {
		p, err := in(node)(metricsAddress, "/metrics")
		if lost := lostLines.FindStringSubmatch(p.body); err == nil && (lost == nil || lost[1] == "0") {
			err = fmt.Errorf("none is: %v", lost)
		}
		return err
	})
	lab.Must(t, agent.Stop())
}
