package lab

import (
	"os"
	"testing"
)

// The Must functions are the lab for tests: they fail the test instead of
// returning an error, close what they made when the test ends, and skip the test
// without root.

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

	return must(t, func() (*Cluster, error) { return New(config) })
}

// MustVeth is [Veth].
func MustVeth(t testing.TB, a, b End) {
	t.Helper()
	if err := Veth(a, b); err != nil {
		t.Fatal(err)
	}
}

// MustDo is [Namespace.Do].
func MustDo(t testing.TB, ns *Namespace, f func() error) {
	t.Helper()
	if err := ns.Do(f); err != nil {
		t.Fatal(err)
	}
}

func must[T closer](t testing.TB, open func() (T, error)) T {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	opened, err := open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := opened.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})

	return opened
}
