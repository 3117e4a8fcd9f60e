package lab

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Timeout limits how long a change may take until every client sees it. It takes
// milliseconds, but the machine may be slow and busy.
const Timeout = 40 * time.Second

// Must fails the test if one of the errors is not nil.
func Must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// Eventually waits until check returns true, or no error.
func Eventually[C func() bool | func() error](t testing.TB, what string, check C) {
	t.Helper()
	EventuallyIn(t, Timeout, what, check)
}

// EventuallyIn is Eventually with another timeout.
func EventuallyIn[C func() bool | func() error](t testing.TB, timeout time.Duration, what string, check C) {
	t.Helper()
	try, reports := any(check).(func() error)
	if !reports {
		holds := any(check).(func() bool)
		try = func() error {
			if !holds() {
				return errors.New("it does not hold")
			}

			return nil
		}
	}
	err := try()
	pause := time.Millisecond
	for deadline := time.Now().Add(timeout); err != nil; err = try() {
		if time.Now().After(deadline) {
			t.Fatalf("not after %v: %s: %v", timeout, what, err)
		}
		time.Sleep(pause)
		pause = min(2*pause, 10*time.Millisecond)
	}
}

// The Must functions are the lab for tests: they fail the test instead of
// returning an error, close what they made when the test ends, and skip the test
// without root.

// MustRun starts what runs until its context ends, and then returns no error. It ends with
// the test, or earlier when end is called.
func MustRun(t testing.TB, run func(context.Context) error) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(Timeout):
			t.Errorf("it has not ended %v after its context", Timeout)
		}
	})
	t.Cleanup(end)

	return end
}

// KeepLog writes what a program has printed to a file that stays, and reports its
// path. Printed by the test, it would bury the messages of the test.
func KeepLog(t testing.TB, program, text string) {
	t.Helper()
	file, err := os.CreateTemp("", "sluice-log-"+program+"-*.log")
	if err != nil {
		t.Error(err)
		return
	}
	_, err = file.WriteString(text)
	if err = errors.Join(err, file.Close()); err != nil {
		t.Error(err)
		return
	}
	t.Logf("what %s has printed: %s", program, file.Name())
}

// MustNamespace is [NewNamespace].
func MustNamespace(t testing.TB, what string) *Namespace {
	t.Helper()

	return must(t, func() (*Namespace, error) { return NewNamespace(what) })
}

// MustCgroup is [NewCgroup].
func MustCgroup(t testing.TB, what string) *Cgroup {
	t.Helper()

	return must(t, func() (*Cgroup, error) { return NewCgroup(what) })
}

// MustCaller is [StartCaller].
func MustCaller(t testing.TB, ns *Namespace, cg *Cgroup) *Caller {
	t.Helper()

	return must(t, func() (*Caller, error) { return StartCaller(ns, cg) })
}

// MustServe is [Serve].
func MustServe(t testing.TB, ns *Namespace, name string, addresses ...string) *Server {
	t.Helper()

	return must(t, func() (*Server, error) { return Serve(ns, name, addresses...) })
}

// MustNew is [New].
func MustNew(t testing.TB, config Config) *Cluster {
	t.Helper()
	cluster := must(t, func() (*Cluster, error) { return New(config) })
	t.Logf("profile of the nodes: %s", cluster.Profile.Name)

	return cluster
}

// MustVeth is [Veth].
func MustVeth(t testing.TB, a, b End) {
	t.Helper()
	Must(t, Veth(a, b))
}

// MustDo is [Namespace.Do].
func MustDo(t testing.TB, ns *Namespace, f func() error) {
	t.Helper()
	Must(t, ns.Do(f))
}

const bpffs = "/sys/fs/bpf"

// MustBPFRoot returns a folder for pins that only the test has. It does not exist
// yet, and what the test leaves there goes with the test.
func MustBPFRoot(t testing.TB) string {
	t.Helper()
	NeedsRoot(t)
	prepare()
	root := filepath.Join(bpffs, newName("pins"))
	t.Cleanup(func() { Must(t, os.RemoveAll(root)) })

	return root
}

func must[T closer](t testing.TB, open func() (T, error)) T {
	t.Helper()
	NeedsRoot(t)
	opened, err := open()
	Must(t, err)
	t.Cleanup(func() {
		if err := opened.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})

	return opened
}
