package e2e

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
)

// lasting is a test that ends with the test binary, for what all tests share.
// The one that needs it first lends its T for what goes wrong at the start.
type lasting struct {
	testing.TB
	folder   string
	cleanups []func()
	failed   bool
}

// binary is the one there is.
var binary lasting

func (l *lasting) Cleanup(f func()) { l.cleanups = append(l.cleanups, f) }
func (l *lasting) TempDir() string  { return l.folder }
func (l *lasting) Failed() bool     { return l.failed }

func (l *lasting) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// end is called after the last test.
func (l *lasting) end(failed bool) {
	l.failed = failed
	for _, f := range slices.Backward(l.cleanups) {
		f()
	}
	os.RemoveAll(l.folder)
}

var shared struct {
	once    sync.Once
	cluster *cluster.Cluster
}

// mustCluster returns the API server that all tests share, which the first
// call starts. It is on the loopback device of the test's own namespace.
func mustCluster(t testing.TB) *cluster.Cluster {
	t.Helper()
	shared.once.Do(func() {
		folder, err := os.MkdirTemp("", "sluice-e2e-")
		if err != nil {
			t.Fatal(err)
		}
		binary.TB, binary.folder = t, folder
		shared.cluster = cluster.Start(&binary)
	})
	if shared.cluster == nil {
		t.Fatal("there is no API server: see the first test that needed one")
	}

	return shared.cluster
}
