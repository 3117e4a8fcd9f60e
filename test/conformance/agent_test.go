package conformance

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// mustLoad opens the maps that the agent of a scene has pinned. They are closed
// with the test.
func mustLoad(t *testing.T, s *scene.Scene) *maps.Pinned {
	t.Helper()
	pinned, err := maps.Load(s.Agent.BPFRoot())
	lab.Must(t, err)
	t.Cleanup(func() { pinned.Close() })

	return pinned
}

func mustRead[K comparable, V any](t *testing.T, table maps.Table[K, V]) map[K]V {
	t.Helper()
	all := make(map[K]V)
	for entry, err := range table.All() {
		lab.Must(t, err)
		all[entry.Key] = entry.Value
	}

	return all
}

// backendIDs are those of the backends that a Service has in the maps.
func backendIDs(t *testing.T, s *scene.Scene, pinned *maps.Pinned, service string) []uint32 {
	t.Helper()
	ports := mustRead(t, pinned.ServicePorts)
	var ids []uint32
	for _, backend := range pinned.Backends.All() {
		port := ports[backend.ServicePortId]
		if backend.Id != 0 && strings.HasPrefix(port.String(), s.Objects.Namespace+"/"+service+":") {
			ids = append(ids, backend.Id)
		}
	}
	slices.Sort(ids)

	return ids
}

// mustRestart starts the next agent of a scene, with other flags, if any. The
// one before is stopped, if it runs.
func mustRestart(t *testing.T, s *scene.Scene, args ...string) {
	t.Helper()
	lab.Must(t, s.Agent.Stop())
	s.Agent.SetArgs(args...)
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)
}

// mustHaveSeenAll waits until the agent has seen what was written before: a
// Service that comes later works.
func mustHaveSeenAll(t *testing.T, s *scene.Scene) {
	t.Helper()
	pod := s.Local()[0]
	marker := s.CreateService(t, "marker")
	address := scene.At(marker.Spec.ClusterIPs[0], 80)
	scene.MustFail(t, s.Pod.To("tcp", address), scene.Rejected)
	s.SetEndpoints(t, "marker", scene.ReadyAll(pod)...)
	scene.MustReach(t, s.Pod.To("tcp", address), pod.Name)
	s.DeleteService(t, "marker")
	s.SetEndpoints(t, "marker")
	scene.MustFail(t, s.Pod.To("tcp", address), scene.Dropped)
}
