package cluster

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
)

// lasting is a test that ends with the test binary, for what all tests share. The
// first test that needs it fails if the start does.
type lasting struct {
	testing.TB

	mu       sync.Mutex
	folder   string
	cleanups []func()
	failed   bool
}

// binary is the lasting test of this test binary.
var binary lasting

// Lasting returns a test that ends with the test binary. Until [Run] ends it, t
// is the test that fails. One test calls it at a time.
func Lasting(t testing.TB) testing.TB {
	t.Helper()
	binary.TB = t
	if binary.folder == "" {
		folder, err := os.MkdirTemp("", "sluice-tests-")
		if err != nil {
			t.Fatal(err)
		}
		binary.folder = folder
	}

	return &binary
}

// Run runs all tests, ends what they shared, and exits. TestMain calls it.
func Run(m *testing.M) {
	code := m.Run()
	if binary.end(code != 0) {
		code = 1
	}
	os.Exit(code)
}

func (l *lasting) Cleanup(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cleanups = append(l.cleanups, f)
}

func (l *lasting) TempDir() string {
	folder, err := os.MkdirTemp(l.folder, "")
	if err != nil {
		l.Fatal(err)
	}

	return folder
}

func (l *lasting) Failed() bool { return l.failed }

func (l *lasting) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Error and Errorf are called at the end, when the T may not be used any more.
func (l *lasting) Error(args ...any) {
	l.failed = true
	fmt.Fprintln(os.Stderr, args...)
}

func (l *lasting) Errorf(format string, args ...any) { l.Error(fmt.Sprintf(format, args...)) }

// end is called after the last test. It is true if something failed.
func (l *lasting) end(failed bool) bool {
	l.failed = failed
	for _, f := range slices.Backward(l.cleanups) {
		f()
	}
	if l.folder != "" {
		os.RemoveAll(l.folder)
	}

	return l.failed
}

var shared struct {
	once    sync.Once
	cluster *Cluster
}

// Shared returns the cluster that all tests of a binary share, which the first
// call starts. It is on the loopback device of the test's own namespace. The
// binary's TestMain calls [Run].
func Shared(t testing.TB) *Cluster {
	t.Helper()
	shared.once.Do(func() { shared.cluster = Start(Lasting(t)) })
	if shared.cluster == nil {
		t.Fatal("there is no API server: see the first test that needed one")
	}

	return shared.cluster
}
