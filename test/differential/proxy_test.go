package differential

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/realproxy"
	"github.com/sluice-lb/sluice/test/sluice"
)

// mustRunKubeProxy starts the real kube-proxy on a side's first node. It ends with
// the test; its rules go with the namespace.
func mustRunKubeProxy(t testing.TB, s *side, c *cluster.Cluster, with settings) {
	t.Helper()
	p, err := realproxy.Start(realproxy.Config{
		Mode:      realproxy.NFTables,
		Binary:    c.Binary("kube-proxy"),
		Config:    with.config(c.Kubeconfig()),
		Namespace: s.Nodes[0].Namespace,
		Directory: t.TempDir(),
	})
	lab.Must(t, err)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			lab.KeepLog(t, "kube-proxy", p.Log())
		}
	})
}

// mustRunSluice starts an agent on a side's first node, with a file that kube-proxy
// could have.
func mustRunSluice(t testing.TB, s *side, c *cluster.Cluster, with settings) {
	t.Helper()
	sluice.MustNode(t, sluice.Config{
		Binary:    *binary,
		Namespace: s.Nodes[0].Namespace,
		Cgroup:    s.cgroup,
		NodeName:  firstNode,
		Args:      []string{"--config", mustWriteConfig(t, c, with)},
	})
}

func mustWriteConfig(t testing.TB, c *cluster.Cluster, with settings) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	lab.Must(t, os.WriteFile(path, []byte(with.config(c.Kubeconfig())), 0o600))

	return path
}
