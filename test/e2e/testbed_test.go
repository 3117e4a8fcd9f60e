package e2e

import (
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// waitTimeout limits waits of this package that the scene does not do. They take
// milliseconds; the machine may be compiling.
const waitTimeout = 10 * time.Second

// testbed is a scene of a test's own, with three pods a node that answer.
//
//	API server ┄ tunnel ┄ node-1 192.168.50.1 ─┬─ pod-1-0 to pod-1-2, :8080
//	                      client, agent        └─ pod-1-3, pod-1-4  clients
//	                      node-2 192.168.50.2 ─── pod-2-0 to pod-2-2, :8080
type testbed struct {
	*scene.Scene
}

// mustTestbed returns a testbed with an agent that is ready.
func mustTestbed(t testing.TB) *testbed {
	t.Helper()

	return &testbed{scene.MustSet(t, scene.Config{
		Lab:  lab.Config{PodsPerNode: 3},
		Args: []string{"--flow-table-memory", "4Mi"}, // each test has an agent
	})}
}

// pods are those that answer, first those of node-1.
func (s *testbed) pods() []*lab.Pod { return append(s.Local(), s.Remote()...) }

// setSlice creates or replaces one slice, with both ports.
func (s *testbed) setSlice(t testing.TB, name, service string, family discoveryv1.AddressType, endpoints ...scene.Endpoint) {
	t.Helper()
	slice := s.Slice(service, family, endpoints...)
	slice.Name = name
	s.PutSlice(t, slice)
}
