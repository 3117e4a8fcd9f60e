package cluster

import (
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// Start is [New] for tests: the cluster has a temporary directory and the flags,
// and ends with the test. If the test fails, [lab.KeepLog] keeps the ends of the
// servers' logs.
func Start(t testing.TB, flags ...string) *Cluster {
	t.Helper()
	lab.LookAtProduct(t)

	c, err := New(t.Context(), Config{Directory: t.TempDir(), Flags: flags})
	lab.Must(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("end of the cluster: %v", err)
		}
		if t.Failed() {
			lab.KeepLog(t, "cluster", c.logTails())
		}
	})

	return c
}

// Kubectl is [Cluster.RunKubectl] without an input. The test fails if kubectl
// does.
func (c *Cluster) Kubectl(t testing.TB, args ...string) string {
	t.Helper()

	return c.KubectlInput(t, "", args...)
}

// KubectlInput is [Cluster.RunKubectl]. The test fails if kubectl does.
func (c *Cluster) KubectlInput(t testing.TB, input string, args ...string) string {
	t.Helper()

	out, err := c.RunKubectl(input, args...)
	lab.Must(t, err)

	return out
}

// StopAPIServer begins an outage: it kills the API server and waits for its
// end, without grace. Connections to its port are refused from then on, and
// no other process gets the port. It does nothing during an outage.
func (c *Cluster) StopAPIServer(t testing.TB) {
	t.Helper()

	c.stopAPIServer()
}

// StartAPIServer ends an outage. It returns when the API answers again, at the
// same URL, with the objects that it had. It does nothing if there is no
// outage.
func (c *Cluster) StartAPIServer(t testing.TB) {
	t.Helper()

	lab.Must(t, c.startAPIServer(t.Context()))
}

// MustTunnel is [Cluster.Tunnel]. It ends with the test.
func (c *Cluster) MustTunnel(t testing.TB, node Listener) *Tunnel {
	t.Helper()

	w, err := c.Tunnel(node)
	lab.Must(t, err)
	t.Cleanup(w.Cut)

	return w
}

// Mend opens the tunnel again.
func (w *Tunnel) Mend(t testing.TB) {
	t.Helper()

	lab.Must(t, w.open())
}
