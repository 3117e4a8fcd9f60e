package e2e

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// Of an agent that hangs, each verb says so after two seconds, and shows what is programmed.
//
//	node-1: an agent that is stopped by a signal ── web ── pod-1-0
func TestAgentThatHangs(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0])...)
	clusterIP := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Node.To("tcp", clusterIP), s.Local()[0].Name)
	lab.Must(t, unix.Kill(s.Agent.PID(), unix.SIGSTOP))
	defer unix.Kill(s.Agent.PID(), unix.SIGCONT)
	for _, test := range []struct {
		verb  string
		fails bool
		texts []string
	}{
		{"status", true, []string{"the agent does not answer within 2s: what is programmed stays in force", "attached to", "MAP"}},
		{"services", false, []string{"the agent does not answer within 2s", clusterIP}},
		{"doctor", true, []string{"problem   agent               the agent does not answer within 2s"}},
		{"explain --to " + clusterIP, false, []string{"translated to ", "the agent does not answer within 2s"}},
	} {
		begin := time.Now()
		shown, err := s.Agent.Run(strings.Fields(test.verb)...)
		if (err != nil) != test.fails {
			t.Errorf("sluice %s: %v", test.verb, err)
		}
		if err != nil {
			shown += err.Error()
		}
		for _, text := range test.texts {
			if !strings.Contains(shown, text) {
				t.Errorf("sluice %s has no %q:\n%s", test.verb, text, shown)
			}
		}
		if took := time.Since(begin); took > 25*time.Second { // on a busy machine
			t.Errorf("sluice %s took %v", test.verb, took)
		}
	}
	scene.MustReach(t, s.Node.To("tcp", clusterIP), s.Local()[0].Name)
}
