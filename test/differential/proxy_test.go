package differential

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// mustRunKubeProxy starts the real kube-proxy on a side's first node. It ends with
// the test; its rules go with the namespace.
func mustRunKubeProxy(t testing.TB, s *side, c *cluster.Cluster, with settings) {
	t.Helper()
	cmd := exec.Command(c.Binary("kube-proxy"), "--config", mustWriteConfig(t, c, with))
	// nft is there, whatever the PATH of the test is.
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	var log syncBuffer
	cmd.Stdout, cmd.Stderr = &log, &log
	// A cgroup of its own, so that it ends with the test also if that is killed.
	must(t, lab.Start(s.Nodes[0].Namespace, lab.MustCgroup(t, "kube-proxy"), cmd))
	t.Cleanup(func() {
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Logf("kube-proxy:\n%s", tail(log.String()))
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
	must(t, os.WriteFile(path, []byte(with.config(c.Kubeconfig())), 0o600))

	return path
}

// syncBuffer is a buffer that may be read while it is written.
type syncBuffer struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

// Write implements [io.Writer].
func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.buffer.String()
}

// tail is the end of a log.
func tail(log string) string {
	const size = 8 << 10

	return log[max(0, len(log)-size):]
}
