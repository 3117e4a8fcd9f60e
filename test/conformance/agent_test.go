package conformance

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// backendIDs are those of the backends that a Service has in the maps.
func backendIDs(t *testing.T, s *scene.Scene, pinned *maps.Pinned, service string) []uint32 {
	t.Helper()
	ports := sluice.MustRead(t, pinned.ServicePorts)
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
