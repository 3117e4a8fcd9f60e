package conformance

import (
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

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
