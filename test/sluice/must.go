package sluice

import (
	"context"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

var built = sync.OnceValues(func() (string, error) {
	return Build(binaries(), "test")
})

// MustBinary returns the binary, built once for all tests of the process.
func MustBinary(t testing.TB) string {
	t.Helper()
	lab.LookAtProduct(t)
	path, err := built()
	lab.Must(t, err)

	return path
}

// MustNode starts an agent and waits until [status.Status.Well]. It ends with
// the test. Binary and NodeName have defaults.
func MustNode(t testing.TB, cfg Config) *Node {
	t.Helper()
	if cfg.Binary == "" {
		cfg.Binary = MustBinary(t)
	}
	if cfg.NodeName == "" {
		cfg.NodeName = "node-1"
	}
	n, err := NewNode(cfg)
	lab.Must(t, err)
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			lab.KeepLog(t, "agent", n.Log())
		}
	})
	lab.Must(t, n.Start())
	MustWait(t, n)

	return n
}

// MustWait is [Node.Wait], for a minute: on a busy machine the kernel takes
// seconds to verify the programs of each kind of device.
func MustWait(t testing.TB, n *Node) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lab.Must(t, n.Wait(ctx))
}

// binaries is where tests build to: outside of the tree, and for one checkout always
// the same place, so that nothing piles up. Another checkout has another: its tests
// may run at the same time.
func binaries() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	_, source, _, _ := runtime.Caller(0)
	checkout := fnv.New64a()
	checkout.Write([]byte(source)) // never fails

	return filepath.Join(cache, "sluice", fmt.Sprintf("test-binaries-%x", checkout.Sum64()))
}

// MustRestart ends the agent, if one runs, and starts the next one with other flags,
// see [Node.SetArgs]. It waits as [MustWait] does.
func MustRestart(t testing.TB, n *Node, args ...string) {
	t.Helper()
	lab.Must(t, n.Stop())
	n.SetArgs(args...)
	lab.Must(t, n.Start())
	MustWait(t, n)
}

// MustLoad opens the maps that the agent has pinned. They are closed with the test.
func MustLoad(t testing.TB, n *Node) *maps.Pinned {
	t.Helper()
	pinned, err := maps.Load(n.BPFRoot())
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, pinned.Close()) })

	return pinned
}

// MustRead returns what a table holds.
func MustRead[K comparable, V any](t testing.TB, table maps.Table[K, V]) map[K]V {
	t.Helper()
	entries, err := maps.Collect(table.All())
	lab.Must(t, err)

	return entries
}

// MustRestartUnmet restarts the agent with these arguments and waits until it is synced, and not well: its configuration
// names what is not there.
func MustRestartUnmet(t testing.TB, n *Node, args ...string) {
	t.Helper()
	lab.Must(t, n.Stop())
	n.SetArgs(args...)
	lab.Must(t, n.Start())
	lab.Must(t, n.WaitSynced(t.Context()))
	if status, err := n.Status(); err != nil || len(status.OfNode()) == 0 {
		t.Errorf("with %q all is as it is configured: %v", args, err)
	}
}
