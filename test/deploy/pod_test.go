package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestDeploy applies the manifests to a real API server, and is the kubelet of a
// node: it runs the image as the DaemonSet specifies, with kube-proxy's own ConfigMap,
// no more capabilities than are granted, and seccomp. The parts follow each
// other: what one leaves programmed is there for the next.
func TestDeploy(t *testing.T) {
	m := mustMachine(t)
	k := &kubelet{machine: m, apiServer: mustAPIServer(t, m.node)}
	t.Run("applied", func(t *testing.T) { testApply(t, k.apiServer) })
	t.Run("pod", func(t *testing.T) { testPod(t, k) })
	t.Run("capabilities", func(t *testing.T) { testCapabilities(t, k) })
	t.Run("node", func(t *testing.T) { testNode(t, k) })
	t.Run("doctor", func(t *testing.T) { testDoctor(t, k) })
	t.Run("cgroups", func(t *testing.T) { testCgroups(t, k) })
	t.Run("privileged-init", func(t *testing.T) { testInit(t, k) })
	t.Run("docs", func(t *testing.T) { testDocs(t, k.apiServer) })
}

func testPod(t *testing.T, k *kubelet) {
	spec := k.mustSpec(t)
	agent := k.mustRun(t, spec)
	k.mustBeReady(t, agent)
	t.Run("has what the manifest grants", func(t *testing.T) { testGrants(t, agent) })
	t.Run("it reports what is not covered", func(t *testing.T) {
		k.mustReportNotCovered(t, agent, spec, "/host/cgroup", "/../..", "those of the machine's other containers")
	})

	backends := k.node.Pods[1:]
	ip := k.mustService(t, "web", backends...) + ":80"
	pod := lab.MustCaller(t, k.node.Pods[0].Namespace, k.cgroups.others)
	node := lab.MustCaller(t, k.node.Namespace, k.cgroups.others)
	outside := lab.MustCaller(t, k.lab.Client.Namespace, nil)
	t.Run("sockets are translated", func(t *testing.T) {
		for _, from := range []*lab.Caller{pod, node} {
			mustReach(t, from, "tcp", ip, backends...)
			mustReach(t, from, "udp", ip, backends...)
		}
	})
	svc, err := k.client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{})
	lab.Must(t, err)
	fromOutside := func(t *testing.T) {
		t.Helper()
		for i, network := range []string{"tcp", "udp"} {
			address := fmt.Sprintf("%s:%d", k.node.IPv4, svc.Spec.Ports[i].NodePort)
			mustReach(t, outside, network, address, backends...)
		}
	}
	t.Run("packets are translated", fromOutside)
	t.Run("what concerns forwarded packets can be seen", func(t *testing.T) {
		if out := agent.log.String(); !strings.Contains(out, `"forwarding to backends on other nodes" stack=false`) {
			t.Errorf("the agent says:\n%s", out)
		}
	})
	t.Run("sockets of every namespace leave a backend that is gone", func(t *testing.T) { testOrphans(t, k, node, pod) })
	t.Run("verbs find the agent", func(t *testing.T) {
		fromOutside(t) // the flows of before may have expired
		testVerbs(t, k, spec)
	})
	t.Run("a cleanup in a pod without its socket is refused", func(t *testing.T) { testForeignCleanup(t, k, pod, ip, backends) })
	t.Run("requests are what the role grants", func(t *testing.T) { testRequests(t, k) })
	t.Run("restarted", func(t *testing.T) {
		agent.mustStop(t)
		mustReach(t, pod, "tcp", ip, backends...)
		again := k.mustSpec(t)
		agent = k.mustRun(t, again)
		mustReach(t, pod, "tcp", ip, backends...)
		k.mustBeReady(t, agent)
		mustReach(t, pod, "tcp", ip, backends...)
		testChange(t, k, agent, again)
		mustReach(t, pod, "tcp", ip, backends...)
	})
	t.Run("removed", func(t *testing.T) { testRemoved(t, k, pod, ip) })
}

// testGrants asks the kernel what the agent may do.
func testGrants(t *testing.T, agent *container) {
	var mask uint64
	for _, name := range granted {
		if held(string(name)) {
			mask |= 1 << capabilities[string(name)]
		}
	}
	want := fmt.Sprintf("%016x", mask)
	for name, want := range map[string]string{
		"CapBnd": want, "CapPrm": want, "CapEff": want, "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2",
	} {
		if got := agent.status(t, name); got != want {
			t.Errorf("%s of the agent is %s, want %s", name, got, want)
		}
	}
	// Lower than what the kubelet gives it takes a capability that is not granted.
	want, level := kubeletScore, "level=INFO "
	if !held("SYS_RESOURCE") { // this machine is as a nested runtime
		want, level = "0", "level=WARN "
	}
	if got := agent.oomScore(t); got != want {
		t.Errorf("the agent's oom_score_adj is %s, want %s", got, want)
	}
	var said []string
	for line := range strings.Lines(agent.log.String()) {
		if strings.Contains(line, "oom_score_adj") {
			said = append(said, line)
		}
	}
	if len(said) != 1 || !strings.Contains(said[0], level) || !strings.Contains(said[0], "oomScoreAdj="+want+" configured=-999") {
		t.Errorf("of its oom_score_adj the agent says %q, want %s once, with %s", said, level, want)
	}
}

// testChange: a kubelet shows another version of the ConfigMap, and the agent ends
// with an error, to be started again.
func testChange(t *testing.T, k *kubelet, agent *container, spec containerSpec) {
	t.Helper()
	configMap, err := k.client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "kube-proxy", metav1.GetOptions{})
	lab.Must(t, err)
	configMap.Data["config.conf"] += "\n# changed"
	mustSwap(t, mustMount(t, spec, "/var/lib/kube-proxy").From, "..second", configMap.Data)
	lab.EventuallyIn(t, waitTimeout, "the agent ends", agent.ended)
	if agent.err == nil || !strings.Contains(agent.log.String(), "/var/lib/kube-proxy/config.conf") {
		t.Errorf("the agent ended with %v, want an error that names the file: %s", agent.err, agent.log.String())
	}
}

// testOrphans: connected UDP sockets lose their backend to another one. No device can lead those of pods there,
// which are behind the same bridge: they are ended in their own network namespaces, also in those of pods that came
// after the agent. That of the node stays, and its next datagram reaches the other backend.
func testOrphans(t *testing.T, k *kubelet, node, pod *lab.Caller) {
	late, err := k.node.AddPod()
	lab.Must(t, err)
	from, to := k.node.Pods[1], k.node.Pods[2]
	ip := k.mustService(t, "dns", from) + ":80"
	sockets := make(map[string]*lab.Socket)
	for name, caller := range map[string]*lab.Caller{
		"node": node, "pod": pod, "late pod": lab.MustCaller(t, late.Namespace, k.cgroups.others),
	} {
		mustReach(t, caller, "udp", ip, from)
		sockets[name] = mustConnect(t, caller, ip)
	}
	k.mustMoveService(t, "dns", to)
	for _, name := range []string{"pod", "late pod"} {
		lab.EventuallyIn(t, waitTimeout, "the socket of the "+name+" is ended", func() error { return aborted(sockets[name]) })
	}
	lab.EventuallyIn(t, waitTimeout, "the socket of the node is led on", func() error { return ledTo(sockets["node"], to) })
}

// testVerbs runs verbs as an operator does with kubectl exec, without flags. The device of a pod that has
// just come may not be attached yet.
func testVerbs(t *testing.T, k *kubelet, spec containerSpec) {
	for verb, want := range map[string]string{
		"status": k.nodeName(), "verify": " 0 differences", "services": "default/web", "backends": k.node.Pods[1].IPv4.String(), "flows": "default/web",
	} {
		lab.EventuallyIn(t, waitTimeout, "sluice "+verb, func() error {
			out, code := k.mustExec(t, spec, verb)
			if code != 0 || !strings.Contains(out, want) {
				return fmt.Errorf("exit code %d, want %q in: %s", code, want, out)
			}

			return nil
		})
	}
}

// testForeignCleanup: a container of kubectl debug shares no folder with the agent's
// but the node's bpffs, which it has at another path.
func testForeignCleanup(t *testing.T, k *kubelet, from *lab.Caller, ip string, backends []*lab.Pod) {
	t.Helper()
	spec := k.mustSpec(t)
	mustMount(t, spec, "/run/sluice").From = t.TempDir()
	mustMount(t, spec, "/host/bpf").To = "/host/sys/fs/bpf"
	out, code := k.mustExec(t, spec, "cleanup", "--bpf-root=/host/sys/fs/bpf/sluice")
	if code == 0 || !strings.Contains(out, "an agent is running: stop it first") {
		t.Errorf("sluice cleanup: exit code %d: %s", code, out)
	}
	mustReach(t, from, "tcp", ip, backends...)
}

// mustProject writes files as a kubelet does: behind links, so that all of them
// change at once.
func mustProject(t testing.TB, files map[string]string) string {
	t.Helper()
	folder := t.TempDir()
	lab.Must(t, os.Chmod(folder, 0o755))
	mustSwap(t, folder, "..first", files)
	for name := range files {
		lab.Must(t, os.Symlink(filepath.Join("..data", name), filepath.Join(folder, name)))
	}

	return folder
}

// mustSwap has a projection show another version of its files.
func mustSwap(t testing.TB, folder, version string, files map[string]string) {
	t.Helper()
	lab.Must(t, os.Mkdir(filepath.Join(folder, version), 0o755))
	for name, text := range files {
		lab.Must(t, os.WriteFile(filepath.Join(folder, version, name), []byte(text), 0o644))
	}
	link := filepath.Join(folder, "..data_tmp")
	lab.Must(t, os.Symlink(version, link), os.Rename(link, filepath.Join(folder, "..data")))
}
