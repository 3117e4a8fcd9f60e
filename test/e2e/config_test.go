package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

const configHeader = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// A node whose agent has a configuration file, which is mounted as that of a pod
// is, and no Services.
type configured struct {
	node   *sluice.Node
	folder string // of the mount
	swaps  int
}

// mustSwap shows another file, as the kubelet does with a ConfigMap's.
func (c *configured) mustSwap(t *testing.T, fields string) {
	t.Helper()
	c.swaps++
	name := fmt.Sprintf("..%d", c.swaps)
	lab.Must(t, os.Mkdir(filepath.Join(c.folder, name), 0o755))
	lab.Must(t, os.WriteFile(filepath.Join(c.folder, name, "config.conf"), []byte(configHeader+fields), 0o644))
	lab.Must(t, os.Symlink(name, filepath.Join(c.folder, "..next")))
	lab.Must(t, os.Rename(filepath.Join(c.folder, "..next"), filepath.Join(c.folder, "..data")))
}

func mustConfigured(t *testing.T, fields string) *configured {
	t.Helper()
	c := &configured{folder: t.TempDir()}
	c.mustSwap(t, fields)
	path := filepath.Join(c.folder, "config.conf")
	lab.Must(t, os.Symlink("..data/config.conf", path))
	c.node = sluice.MustNode(t, sluice.Config{
		Namespace: lab.MustNamespace(t, "node"),
		Cgroup:    lab.MustCgroup(t, "e2e"),
		Manifests: t.TempDir(),
		Args:      []string{"--config", path},
	})

	return c
}

// The file's values reach the process and the kernel.
func TestConfigOfProcess(t *testing.T) {
	c := mustConfigured(t, "oomScoreAdj: 7\nlogging: {format: json}\nwinkernel: {networkName: l2}")
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", c.node.PID()))
	lab.Must(t, err)
	if got := strings.TrimSpace(string(text)); got != "7" {
		t.Errorf("oom_score_adj is %s, want 7", got)
	}
	log := c.node.Log()
	if n := strings.Count(log, `"settings without an effect in Sluice","fields":["winkernel.networkName"]`); n != 1 {
		t.Errorf("the field that means nothing is named %d times, want once:\n%s", n, log)
	}
	if !strings.Contains(log, `nodePortAddresses is not set`) {
		t.Errorf("nothing warns of node ports at all addresses:\n%s", log)
	}
}

const nodeOfIPv6Pods = `
apiVersion: v1
kind: Node
metadata: {name: node-1}
spec: {podCIDRs: ["fd00::/64"]}
status: {addresses: [{type: InternalIP, address: 192.168.50.1}]}
`

// As kube-proxy, the agent does not start with pods' ranges that are all of
// another family than the node.
func TestConfigThatDoesNotFitTheNode(t *testing.T) {
	manifests, path := t.TempDir(), filepath.Join(t.TempDir(), "config.conf")
	for path, text := range map[string]string{filepath.Join(manifests, "node.yaml"): nodeOfIPv6Pods, path: configHeader + "detectLocalMode: NodeCIDR"} {
		lab.Must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: lab.MustNamespace(t, "node"), Cgroup: lab.MustCgroup(t, "e2e"),
		NodeName: "node-1", Manifests: manifests, Args: []string{"--config", path},
	})
	lab.Must(t, err)
	t.Cleanup(func() { node.Close() })
	lab.Must(t, node.Start())
	const want = "the Node's podCIDRs [fd00::/64] have only IPv6 addresses, and its primary address is of IPv4"
	if end := mustEnd(t, node); !strings.Contains(end, want) {
		t.Errorf("it ended with %s", end)
	}
}

// A change of the file ends the agent with an error, so that what supervises
// it starts it again; what is programmed stays, and the next one reads the new
// file.
func TestConfigChangeEndsAgent(t *testing.T) {
	c := mustConfigured(t, "")
	pid := c.node.PID()
	c.mustSwap(t, "") // the same again
	c.mustSwap(t, "oomScoreAdj: 5")
	end := mustEnd(t, c.node)
	if !strings.Contains(end, "exit status 1") || !strings.Contains(end, "config.conf: the configuration has changed") {
		t.Errorf("it ended with %s", end)
	}
	status, err := c.node.Status()
	lab.Must(t, err)
	for _, hook := range status.Hooks {
		if hook.Problem != "" {
			t.Errorf("hook %s is gone with the agent: %s", hook.Name, hook.Problem)
		}
	}
	lab.Must(t, c.node.Kill())
	lab.Must(t, c.node.Start())
	sluice.MustWait(t, c.node)
	if c.node.PID() == pid {
		t.Error("it is still the same process")
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", c.node.PID()))
	if got := strings.TrimSpace(string(text)); err != nil || got != "5" {
		t.Errorf("oom_score_adj is %s, %v, want 5, as in the new file", got, err)
	}
}
