package deploy

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// testRemoved: what an ended agent has left is told in a pod of deploy/nodes, and is gone when a pod of
// deploy/cleanup has become ready.
func testRemoved(t *testing.T, k *kubelet, client *lab.Caller, ip string) {
	nodes := k.mustApplyNodes(t, "nodes")
	waiting := k.mustSpecOf(t, nodes, nodes.Containers[0])
	pod := k.mustRun(t, waiting)
	for _, verb := range []string{"status", "doctor"} {
		out, code := k.mustExec(t, waiting, verb)
		if code != 1 || !strings.Contains(out, "programs without an agent since 20") {
			t.Errorf("sluice %s on a node without an agent: exit code %d: %s", verb, code, out)
		}
	}
	if k.mustAttached(t) == 0 {
		t.Error("no program is attached before the cleanup")
	}
	pod.mustStop(t)

	cleaning := k.mustApplyNodes(t, "cleanup")
	first := k.mustSpecOf(t, cleaning, cleaning.InitContainers[0])
	if out, code := k.mustExec(t, first, first.Args[1:]...); code != 0 {
		t.Fatalf("sluice %q: exit code %d: %s", first.Args[1:], code, out)
	}
	for _, folder := range []string{k.bpffs, k.path("/run/sluice")} {
		left, err := os.ReadDir(folder)
		lab.Must(t, err)
		if len(left) > 0 {
			t.Errorf("in %s are left: %v", folder, left)
		}
	}
	if n := k.mustAttached(t); n > 0 {
		t.Errorf("%d programs are attached", n)
	}
	if reply, err := client.Request("tcp", ip); err == nil {
		t.Errorf("%s, although no agent translates", reply.Text)
	}
	out, _ := k.mustExec(t, k.mustSpecOf(t, cleaning, cleaning.Containers[0]), "status")
	if !strings.Contains(out, "not running, and nothing is programmed") {
		t.Errorf("afterwards, sluice status prints:\n%s", out)
	}
	k.KubectlInput(t, mustKustomize(t, "cleanup"), "delete", "-f", "-")
}

// mustApplyNodes applies a folder with the DaemonSet sluice-nodes, and returns what its pods are.
func (k *kubelet) mustApplyNodes(t *testing.T, folder string) corev1.PodSpec {
	t.Helper()
	k.KubectlInput(t, mustKustomize(t, folder), "apply", "--server-side", "--validate=strict", "-f", "-")
	set, err := k.client.AppsV1().DaemonSets("kube-system").Get(t.Context(), "sluice-nodes", metav1.GetOptions{})
	lab.Must(t, err)

	return set.Spec.Template.Spec
}

// mustAttached counts what is attached to the node's cgroup and devices, and its tables of nftables: nothing but Sluice
// attaches programs here, or makes tables.
func (k *kubelet) mustAttached(t *testing.T) (attached int) {
	t.Helper()
	count := func(target int, at ebpf.AttachType) {
		found, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: at})
		if err == nil { // or this kernel has no such hook
			attached += len(found.Programs)
		}
	}
	cgroup, err := os.Open(k.cgroups.root.Path())
	lab.Must(t, err)
	defer cgroup.Close()
	for at := ebpf.AttachCGroupInetIngress; at <= ebpf.AttachCgroupUnixGetsockname; at++ {
		count(int(cgroup.Fd()), at)
	}
	lab.MustDo(t, k.node.Namespace, func() error {
		devices, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, device := range devices {
			count(device.Index, ebpf.AttachTCXIngress)
			count(device.Index, ebpf.AttachTCXEgress)
		}
		for _, command := range []string{"tc qdisc show", "nft list tables"} {
			words := strings.Fields(command)
			out, err := exec.Command(words[0], words[1:]...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%s: %w: %s", command, err, out)
			}
			attached += strings.Count(string(out), "clsact") + strings.Count(string(out), "table ")
		}

		return nil
	})

	return attached
}
