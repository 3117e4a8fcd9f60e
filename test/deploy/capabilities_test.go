package deploy

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// testCapabilities: each one that the manifest grants is needed, the larger one
// cannot be had smaller, and the one of a component is good for something.
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
	t.Run("with SYS_RESOURCE, which a component adds, its oom_score_adj is as configured", func(t *testing.T) {
		if !held("SYS_RESOURCE") {
			t.Skip("root has no SYS_RESOURCE on this machine: what it is good for cannot be seen")
		}
		pod := *mustBuild(t, "overlays/kubeadm", "sys-resource").pod()
		agent := start(t, k.mustSpecOf(t, pod, pod.Containers[0]).Capabilities...)
		k.mustBeReady(t, agent)
		if got := agent.oomScore(t); got != "-999" { // kube-proxy's default
			t.Errorf("the agent's oom_score_adj is %s, want -999", got)
		}
		if out := agent.output(); strings.Contains(out, "oom_score_adj") {
			t.Errorf("the agent speaks of its oom_score_adj: %s", out)
		}
	})
}

// mustEnd waits until an agent ends with a message that it lacks a permission.
func (k *kubelet) mustEnd(t *testing.T, agent *container, what string) {
	t.Helper()
	lab.EventuallyIn(t, waitTimeout, "the agent ends", agent.ended)
	lines := strings.Split(strings.TrimSpace(agent.output()), "\n")
	last := lines[len(lines)-1]
	if agent.err == nil || !strings.Contains(last, what) || !strings.Contains(last, "operation not permitted") {
		t.Errorf("the agent ended with %v: %s; want a %s that it is not permitted", agent.err, last, what)
	}
}
