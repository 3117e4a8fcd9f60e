package deploy

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// testCapabilities: each one that the manifest grants is needed, and the larger
// one cannot be had smaller.
func testCapabilities(t *testing.T, k *kubelet) {
	all := k.mustSpec(t).Capabilities
	start := func(t *testing.T, capabilities ...string) *container {
		spec := k.mustSpec(t)
		whole := spec
		t.Cleanup(func() { k.mustExec(t, whole, "cleanup") })
		spec.Capabilities = capabilities

		return k.mustRun(t, spec)
	}
	t.Run("without SYS_ADMIN it cannot load programs", func(t *testing.T) {
		k.mustEnd(t, start(t, without(all, "SYS_ADMIN")...), "load program")
	})
	t.Run("with BPF and PERFMON instead, it cannot enter namespaces", func(t *testing.T) {
		k.mustEnd(t, start(t, append(without(all, "SYS_ADMIN"), "BPF", "PERFMON")...), "network namespace")
	})
	t.Run("without NET_ADMIN it cannot follow the node", func(t *testing.T) {
		k.mustEnd(t, start(t, without(all, "NET_ADMIN")...), "receive buffer")
	})
	t.Run("without SYS_RESOURCE anybody is killed before it", func(t *testing.T) {
		if !held("SYS_RESOURCE") {
			t.Skip("root has no SYS_RESOURCE on this machine: what it is good for cannot be seen")
		}
		agent := start(t, without(all, "SYS_RESOURCE")...)
		k.mustBeReady(t, agent)
		score, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", agent.cmd.Process.Pid))
		must(t, err)
		if got := strings.TrimSpace(string(score)); got == "-999" {
			t.Error("the agent's oom_score_adj is -999 without SYS_RESOURCE: it is not needed")
		}
		if !strings.Contains(agent.output(), "oom") {
			t.Errorf("the agent does not tell of it: %s", agent.output())
		}
	})
}

// mustEnd waits until an agent ends, and says that it may not do something.
func (k *kubelet) mustEnd(t *testing.T, agent *container, what string) {
	t.Helper()
	eventually(t, "the agent ends", agent.ended)
	lines := strings.Split(strings.TrimSpace(agent.output()), "\n")
	last := lines[len(lines)-1]
	if agent.err == nil || !strings.Contains(last, what) || !strings.Contains(last, "operation not permitted") {
		t.Errorf("the agent ended with %v: %s; want a %s that it is not permitted", agent.err, last, what)
	}
}
