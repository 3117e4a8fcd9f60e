package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
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
// finds out what it has missed: endpoints and Services that are gone, and so many that it is told. The Node is gone, too,
// but load balancers keep the node: an API server that lists no Nodes would end all of them at once.
//
//	pod ────── web:80 ─┬─ pod-1-0, goes meanwhile
//	                   └─ pod-2-0
//	           gone:80 ── pod-1-0, goes meanwhile
//	           spare-0 to spare-9, go meanwhile
func TestCutOff(t *testing.T) {
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent, "--healthz-bind-address=0.0.0.0:10256")
	self, leaves, stays := s.Lab.Nodes[0], s.Local()[0], s.Remote()[0]
	mustBeEligible := func(code int, eligible string) {
		t.Helper()
		mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/healthz", code, `"nodeEligible":`+eligible, `"healthy":true`)
	}
	const spares = 10
	for i := range spares {
		s.CreateService(t, fmt.Sprintf("spare-%d", i))
	}
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
	for i := range spares {
		s.DeleteService(t, fmt.Sprintf("spare-%d", i))
	}
	s.deleteNode(t, self)
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
	s.mustMeasure(t, `sluice_objects_gone_total{kind="Service"}`, spares+1)
	lab.EventuallyIn(t, watchRetry, "the agent says that its Node is not listed", func() bool {
		status, err := s.Agent.Status()
		return err == nil && slices.ContainsFunc(status.Problems, func(p lb.Problem) bool {
			return p.Object == "Node "+s.NodeName(self) && strings.Contains(p.Message, "does not list it")
		})
	})
	mustBeEligible(200, "true")

	// A Node whose deletion is seen takes the node out of load balancers.
	s.CreateNode(t, self)
	lab.Eventually(t, "all is well", func() bool {
		status, err := s.Agent.Status()
		return err == nil && status.Well()
	})
	s.deleteNode(t, self)
	mustBeEligible(503, "false")
	s.CreateNode(t, self)
	mustBeEligible(200, "true")
}

// watchRetry limits waits for all watches after an outage: each has a pause of its own before it tries again, of a minute
// at most.
const watchRetry = 90 * time.Second

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
