package e2e

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The connections to the API server bring nothing any more and do not end, as with a proxy on the way that has lost
// its peer. New ones work. Within the minute in which HTTP/2 gives up a connection whose pings are not answered, the agent
// follows the API server by new ones. Then new ones bring nothing either, and after two minutes the agent's status says
// so. Health checks stay green all the time: a restart would not help, and all nodes would leave their load balancers at
// once.
//
//	pod ────── web:80 ─┬─ pod-1-0, goes meanwhile
//	                   └─ pod-2-0
func TestFrozenConnections(t *testing.T) {
	t.Parallel() // it waits for timeouts of HTTP/2
	s := mustTestbed(t)
	self, leaves, comes := s.Lab.Nodes[0], s.Local()[0], s.Remote()[0]
	sluice.MustRestart(t, s.Agent, "--healthz-bind-address=0.0.0.0:10256")
	s.SetEndpoints(t, "web", scene.ReadyAll(leaves)...)
	web := s.CreateService(t, "web", balancer)
	ip := scene.At(web.Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), leaves.Name)
	mustBeGreen := func() {
		t.Helper()
		for _, path := range []string{"/healthz", "/livez", "/readyz"} {
			mustAnswer(t, of(s.Node), "127.0.0.1:10256", path, 200)
		}
		mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), web.Spec.HealthCheckNodePort), "/", 200)
	}
	mustBeGreen()

	s.Tunnel.Freeze()
	begin := time.Now()
	s.SetEndpoints(t, "web", scene.ReadyAll(leaves, comes)...)
	for s.Pod.To("tcp", ip).Reaches(leaves.Name, comes.Name) != nil {
		mustBeGreen()
		if time.Since(begin) > 130*time.Second {
			t.Fatal("the changed endpoint has not arrived in 130 s")
		}
		time.Sleep(500 * time.Millisecond)
	}
	t.Logf("the changed endpoint arrived after %v", time.Since(begin))
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("it took %v, want a minute at most", took)
	}
	lab.EventuallyIn(t, time.Minute, "all watches are heard again", func() error {
		status, err := s.Agent.Status()
		if err == nil && (len(status.Silence) != 4 || slices.Max(slices.Collect(maps.Values(status.Silence))) > 20*time.Second || !status.Well()) {
			err = fmt.Errorf("watches are silent for %v; troubles: %q", status.Silence, status.Troubles())
		}

		return err
	})

	s.Tunnel.Silence()
	lab.EventuallyIn(t, 3*time.Minute, "the agent knows that it hears nothing", func() error {
		mustBeGreen()
		time.Sleep(time.Second)
		status, err := s.Agent.Status()
		if err == nil && (len(status.Silent()) != 4 || status.Well()) {
			err = fmt.Errorf("watches are silent for %v; all is well: %t", status.Silence, status.Well())
		}

		return err
	})
	text := mustAnswer(t, of(s.Node), metricsAddress, "/metrics", 200).body
	for _, resource := range []string{"endpointslices", "nodes", "servicecidrs", "services"} {
		found := regexp.MustCompile(`(?m)^sluice_watch_last_event_seconds{resource="` + resource + `"} (.*)$`).FindStringSubmatch(text)
		if found == nil {
			t.Errorf("there is no metric of %s", resource)
		} else if seconds, err := strconv.ParseFloat(found[1], 64); err != nil || seconds < 120 {
			t.Errorf("the metric of %s is %s, want more than 120", resource, found[1])
		}
	}
}
