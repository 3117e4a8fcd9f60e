package cluster

import (
	"sync"
	"testing"
)

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
