package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// A tenant who writes Services takes nothing that another one uses: an older Service that names an external IP
// later waits, also through a restart. Where the IP is the node's own, or another Service's ClusterIP, ports get
// clients of the other one, as with kube-proxy, and both are told.
//
//	192.0.2.9:80    used ── pod-1-0; named later by an older one ── pod-2-0
//	node-1:nodePort ported ── pod-1-0; taken ── pod-2-0
func TestTenantsClaims(t *testing.T) {
	s := mustTestbed(t)
	mine, theirs := s.Local()[0], s.Remote()[0]
	const external = "192.0.2.9:80"
	s.SetEndpoints(t, "older", scene.ReadyAll(theirs)...)
	s.CreateService(t, "older")
	s.SetEndpoints(t, "used", scene.ReadyAll(mine)...)
	s.CreateService(t, "used", withExternalIP("192.0.2.9"))
	scene.MustReach(t, s.Pod.To("tcp", external), mine.Name)
	dial := s.Pod.To("tcp", external)
	load, err := dial.From.StartLoad(lab.Load{Exchange: dial.Exchange(), Rate: 50})
	lab.Must(t, err)

	s.ChangeService(t, "older", withExternalIP("192.0.2.9"))
	s.mustSeeEvent(t, s.Namespace, "older", "AddressTaken", external+"/TCP belongs to Service "+s.Namespace+"/used")
	scene.MustReach(t, s.Pod.To("tcp", external), mine.Name)
	lab.Must(t, s.Agent.Kill())
	lab.Must(t, s.Agent.Start())
	lab.EventuallyIn(t, time.Minute, "the next agent knows all Services", func() bool { // the one that lost is an error to it
		status, _ := s.Agent.Status() // an error until it answers

		return status.Synced
	})
	scene.MustReach(t, s.Pod.To("tcp", external), mine.Name)
	report, err := load.Stop()
	lab.Must(t, err)
	if len(report.Failures) > 0 || report.Answers[mine.Name] != report.Started {
		t.Errorf("of %d exchanges at an address in use these answered: %v; failures: %v", report.Started, report.Answers, report.Failures)
	}
	s.ChangeService(t, "used", func(svc *corev1.Service) { svc.Spec.ExternalIPs = nil })
	scene.MustReach(t, s.Pod.To("tcp", external), theirs.Name)

	s.SetEndpoints(t, "ported", scene.ReadyAll(mine)...)
	ported := s.CreateService(t, "ported", scene.NodePort)
	number, node := ported.Spec.Ports[0].NodePort, s.Lab.Nodes[0].IPv4.String()
	nodePort := scene.At(node, number)
	scene.MustReach(t, s.Pod.To("tcp", nodePort), mine.Name)
	s.SetEndpoints(t, "taker", scene.ReadyAll(theirs)...)
	s.CreateService(t, "taker", withExternalIP(node), func(svc *corev1.Service) {
		for i := range svc.Spec.Ports {
			if svc.Spec.Ports[i].Protocol == ported.Spec.Ports[0].Protocol {
				svc.Spec.Ports[i].Port = number
			}
		}
	})
	scene.MustReach(t, s.Pod.To("tcp", nodePort), theirs.Name)
	taken := fmt.Sprintf("node port %d/TCP", number)
	s.mustSeeEvent(t, s.Namespace, "ported", "AddressTaken", taken+" at "+node+" belongs to Service "+s.Namespace+"/taker")
	s.mustSeeEvent(t, s.Namespace, "taker", "AddressOverlaps", fmt.Sprintf("%s/TCP gets clients of %s of Service %s/ported", nodePort, taken, s.Namespace))
	shown, err := s.Agent.Run("explain", "--to", nodePort)
	if err != nil || !strings.Contains(shown, "gets clients of "+taken+" of Service "+s.Namespace+"/ported") {
		t.Errorf("explain %s shows, error %v:\n%s", nodePort, err, shown)
	}
	if shown, err := s.Agent.Run("status"); !strings.Contains(shown, taken+" at "+node+" belongs to") {
		t.Errorf("status shows, error %v:\n%s", err, shown)
	}
}
