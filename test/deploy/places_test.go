package deploy

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// testNode checks the manifest's mounts of the node's own folders: which nothing is
// attached to here, is what verbs find; and the agent reports a node without bpffs.
func testNode(t *testing.T, k *kubelet) {
	cgroup, err := lab.CgroupRoot()
	lab.Must(t, err)
	t.Run("the root of cgroup2 is found", func(t *testing.T) {
		spec := k.mustSpec(t)
		spec.Node = cgroupNode{} // this machine
		mustMount(t, spec, "/host/cgroup").From = cgroup
		out, _ := k.mustExec(t, spec, "status", "-o", "json") // it reports that no agent runs
		for _, want := range []string{`"cgroupRoot": "/host/cgroup"`, `"bpfRoot": "/host/bpf/sluice"`} {
			if !strings.Contains(out, want) {
				t.Errorf("sluice status does not say %s: %s", want, out)
			}
		}
	})
	t.Run("a node without bpffs is reported", func(t *testing.T) {
		spec := k.mustSpec(t)
		mustMount(t, spec, "/host/bpf").From = t.TempDir()
		agent := k.mustRun(t, spec)
		lab.EventuallyIn(t, waitTimeout, "the agent ends", agent.ended)
		if out := agent.log.String(); !strings.Contains(out, "not on a bpf file system (mount -t bpf bpf /sys/fs/bpf)") {
			t.Errorf("the agent ended with %v: %s", agent.err, out)
		}
	})
}

// mustMount returns the mount at a path, to be changed.
func mustMount(t *testing.T, spec containerSpec, path string) *mount {
	t.Helper()
	for i := range spec.Mounts {
		if spec.Mounts[i].To == path {
			return &spec.Mounts[i]
		}
	}
	t.Fatalf("nothing is mounted at %s", path)

	return nil
}

// testInit: the privileged container of the component does what the agent may not,
// and leaves what the agent goes on with.
func testInit(t *testing.T, k *kubelet) {
	pod := *mustBuild(t, "overlays/kubeadm", "privileged-init").pod()
	end := func(t *testing.T, spec containerSpec) {
		c := k.mustRun(t, spec)
		<-c.done
		if c.err != nil {
			t.Errorf("the container ended with %v: %s", c.err, c.log.String())
		}
	}
	t.Run("conntrack is set as kube-proxy does", func(t *testing.T) {
		spec := k.mustSpecOf(t, pod, pod.InitContainers[0])
		end(t, spec)
		var text []byte
		lab.Must(t, k.node.Do(func() (err error) {
			text, err = os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait")

			return err
		}))
		if got := strings.TrimSpace(string(text)); got != "3600" {
			t.Errorf("nf_conntrack_tcp_timeout_close_wait is %s, want 3600", got)
		}
		agent := k.mustRun(t, k.mustSpec(t))
		k.mustBeReady(t, agent)
		if out := agent.log.String(); strings.Contains(out, "close_wait") {
			t.Errorf("the agent still wants to set it: %s", out)
		}
		agent.mustStop(t)
		if out, code := k.mustExec(t, k.mustSpec(t), "cleanup"); code != 0 {
			t.Errorf("sluice cleanup: exit code %d: %s", code, out)
		}
	})
	t.Run("bpffs is mounted where there is none", func(t *testing.T) {
		spec := k.mustSpecOf(t, pod, pod.InitContainers[0])
		mustMount(t, spec, "/host/bpf").From = t.TempDir()
		end(t, spec)
	})
}
