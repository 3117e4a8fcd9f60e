package e2e

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The API server is restarted, which takes seconds: no client notices, and the agent gets the changes that follow.
//
//	pod, node-1 ────── web:80 ─┬─ pod-1-0
//	                           └─ pod-2-0, when the API server is back
func TestAPIServerRestart(t *testing.T) {
	s := mustTestbed(t)
	before, after := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(before)...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), before.Name)
	load := scene.MustDial(t, 100, s.Pod.To("tcp", ip), s.Node.To("tcp", ip), s.Node.To("udp", ip))

	begin := time.Now()
	cluster.Shared(t).StopAPIServer(t)
	cluster.Shared(t).StartAPIServer(t)
	t.Logf("the API server was away for %v", time.Since(begin))
	s.SetEndpoints(t, "web", scene.ReadyAll(before, after)...)
	mustReachAfterOutage(t, s.Pod.To("tcp", ip), before.Name, after.Name)
	load.MustKeepUp(t)
}

// The agent is cut off from the API server for so long that it cannot go on
// where it was. What it had programmed stays in force. When the API server is back, it
// finds out what it has missed: endpoints and a Service that are gone.
//
//	pod ────── web:80 ─┬─ pod-1-0, goes meanwhile
//	                   └─ pod-2-0
//	           gone:80 ── pod-1-0, goes meanwhile
func TestCutOff(t *testing.T) {
	s := mustTestbed(t)
	leaves, stays := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(leaves, stays)...)
	s.SetEndpoints(t, "gone", scene.ReadyAll(leaves)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	gone := scene.At(s.CreateService(t, "gone").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", web), leaves.Name, stays.Name)
	scene.MustReach(t, s.Pod.To("tcp", gone), leaves.Name)
	connected := mustConnect(t, s.Pod, gone)
	load := scene.MustDial(t, 100, s.Pod.To("tcp", web), s.Node.To("udp", web), s.Node.To("tcp", gone))

	s.Tunnel.Cut()
	s.SetEndpoints(t, "web", scene.ReadyAll(stays)...)
	s.DeleteSlice(t, "gone-v4")
	s.DeleteService(t, "gone")
	// A new API server does not have the history of the old one.
	cluster.Shared(t).StopAPIServer(t)
	cluster.Shared(t).StartAPIServer(t)
	scene.MustReach(t, s.Pod.To("tcp", web), leaves.Name, stays.Name)
	scene.MustReach(t, s.Pod.To("tcp", gone), leaves.Name)
	load.MustKeepUp(t)

	s.Tunnel.Mend(t)
	mustReachAfterOutage(t, s.Pod.To("tcp", web), stays.Name)
	scene.MustFail(t, s.Pod.To("tcp", gone), scene.Dropped)
	mustBeUnanswered(t, connected)
	pinned := sluice.MustLoad(t, s.Agent)
	lab.Eventually(t, "the deleted Service leaves no trace in the maps", func() bool {
		return !mentions(mustDump(t, pinned), s.Namespace+"/gone") && len(backendIDs(t, pinned, leaves)) == 0
	})
}

// mustReachAfterOutage is [scene.MustReach] with a longer timeout: an agent does not ask
// a broken API server all the time.
func mustReachAfterOutage(t *testing.T, d scene.Dial, want ...string) {
	t.Helper()
	begin := time.Now()
	for d.Reaches(want...) != nil && time.Since(begin) < time.Minute {
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("the agent has caught up after %v", time.Since(begin))
	scene.MustReach(t, d, want...)
}
