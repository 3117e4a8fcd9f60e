package cluster_test

import (
	"net"
	"net/url"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
)

// Without a test, failures are returned as errors, and nothing outlives Close.
func TestCore(t *testing.T) {
	c, err := cluster.New(t.Context(), cluster.Config{Directory: t.TempDir()})
	lab.Must(t, err)
	defer c.Close()

	got, err := c.RunKubectl("", "get", "--raw=/readyz")
	if got != "ok" || err != nil {
		t.Errorf("kubectl sees %q, %v, want ok", got, err)
	}
	const wrong = "is no object"
	if _, err := c.RunKubectl(wrong, "apply", "-f", "-"); err == nil || !strings.Contains(err.Error(), "error") {
		t.Errorf("the error of kubectl with wrong input is %v, want one that quotes it", err)
	}

	server, err := url.Parse(c.URL())
	lab.Must(t, err)
	tunnel, err := c.Tunnel(loopback(server.Port()))
	lab.Must(t, err)
	near := net.JoinHostPort(nearAddress, server.Port())
	if !answers(near) {
		t.Error("no server answers at the near end of the tunnel")
	}
	mustClose(t, tunnel)
	if answers(near) {
		t.Error("the tunnel is open after its end")
	}

	mustClose(t, c)
	mustClose(t, c)
	if answers(server.Host) {
		t.Error("the API server outlives its cluster")
	}
}

// The error about an API server that does not start contains the reason.
func TestNoStart(t *testing.T) {
	c, err := cluster.New(t.Context(), cluster.Config{Directory: t.TempDir(), Flags: []string{"--service-cluster-ip-range=everywhere"}})
	if err == nil {
		c.Close()
		t.Fatal("the cluster starts with a wrong flag")
	}
	if !strings.Contains(err.Error(), "service-cluster-ip-range[0]") {
		t.Errorf("the error is %v, want one that quotes the log", err)
	}
}

// nearAddress stands for a node's loopback device.
const nearAddress = "127.0.0.2"

// loopback listens at a port of nearAddress.
type loopback string

func (l loopback) Listen(network, _ string) (net.Listener, error) {
	return net.Listen(network, net.JoinHostPort(nearAddress, string(l)))
}

func answers(address string) bool {
	conn, err := net.Dial("tcp", address)
	if err == nil {
		conn.Close()
	}

	return err == nil
}

func mustClose(t *testing.T, c interface{ Close() error }) {
	t.Helper()

	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
