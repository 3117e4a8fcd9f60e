package e2e

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The API server is restarted, which takes seconds, and goes on as if nothing
// had been: no client notices, and the agent gets the changes that follow.
//
//	pod-1-0, node-1 ── web:80 ─┬─ pod-1-1
//	                           └─ pod-2-0, when the API server is back
func TestAPIServerRestart(t *testing.T) {
	s := mustScene(t)
	before, after := s.local()[0], s.remote()[0]
	s.setEndpoints(t, "web", readyAll(before)...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, before.Name)
	load := mustDial(t, 100, dial{s.pod, "tcp", ip}, dial{s.node, "tcp", ip}, dial{s.node, "udp", ip})

	begin := time.Now()
	mustCluster(t).StopAPIServer(t)
	mustCluster(t).StartAPIServer(t)
	t.Logf("the API server was away for %v", time.Since(begin))
	s.setEndpoints(t, "web", readyAll(before, after)...)
	mustReachAfterOutage(t, dial{s.pod, "tcp", ip}, before.Name, after.Name)
	load.mustHaveWorked(t)
}

// The agent is cut off from the API server for so long that it cannot go on
// where it was. What it had programmed stays in force. When the API server is back, it
// finds out what it has missed: endpoints and a Service that are gone.
//
//	pod-1-0 ── web:80 ─┬─ pod-1-1, goes meanwhile
//	                   └─ pod-2-0
//	           gone:80 ── pod-1-1, goes meanwhile
func TestCutOff(t *testing.T) {
	s := mustScene(t)
	leaves, stays := s.local()[0], s.remote()[0]
	s.setEndpoints(t, "web", readyAll(leaves, stays)...)
	s.setEndpoints(t, "gone", readyAll(leaves)...)
	web := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	gone := at(s.createService(t, "gone").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", web}, leaves.Name, stays.Name)
	mustReach(t, dial{s.pod, "tcp", gone}, leaves.Name)
	connected := mustConnect(t, s.pod, gone)
	load := mustDial(t, 100, dial{s.pod, "tcp", web}, dial{s.node, "udp", web}, dial{s.node, "tcp", gone})

	s.tunnel.Cut()
	s.setEndpoints(t, "web", readyAll(stays)...)
	s.deleteSlice(t, "gone-v4")
	s.deleteService(t, "gone")
	// A new API server does not have the history of the old one.
	mustCluster(t).StopAPIServer(t)
	mustCluster(t).StartAPIServer(t)
	mustReach(t, dial{s.pod, "tcp", web}, leaves.Name, stays.Name)
	mustReach(t, dial{s.pod, "tcp", gone}, leaves.Name)
	load.mustHaveWorked(t)

	s.tunnel.Mend(t)
	mustReachAfterOutage(t, dial{s.pod, "tcp", web}, stays.Name)
	mustFail(t, dial{s.pod, "tcp", gone}, unix.EHOSTUNREACH)
	mustBeAborted(t, connected)
	pinned := mustLoad(t, s.agent)
	eventually(t, "the deleted Service leaves no trace in the maps", func() bool {
		return !mentions(mustDump(t, pinned), s.namespace+"/gone") && len(backendIDs(t, pinned, leaves)) == 0
	})
}

// mustReachAfterOutage is [mustReach] with a longer timeout: an agent does not ask
// a broken API server all the time.
func mustReachAfterOutage(t *testing.T, d dial, want ...string) {
	t.Helper()
	begin := time.Now()
	for d.reaches(want, func() {}) != nil && time.Since(begin) < time.Minute {
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("the agent has caught up after %v", time.Since(begin))
	mustReach(t, d, want...)
}
