package conformance

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/scene"
)

// A Service of one family gets the other one, and loses it again. Who uses the
// first does not notice; connections of the second go on.
//
//	clients ──── web:80, IPv4, and IPv6 for a while ─┬─ pod-1-0
//	                                                 └─ pod-2-0
func TestFamiliesOfAService(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(here, there)...)
	web := s.CreateService(t, "web", scene.NodePort, func(svc *corev1.Service) {
		svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
		svc.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol}
	})
	v4 := scene.At(web.Spec.ClusterIP, 80)
	number := scene.At(s.Lab.Nodes[0].IPv6.String(), web.Spec.Ports[0].NodePort)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", v4), here.Name, there.Name)
	}
	scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", number)...) // by the node
	first := scene.MustOpenAll(t, s.Clients(), v4, "tcp", "udp")
	load := scene.MustDial(t, 25, append(scene.Dials(s.Clients(), "tcp", v4), scene.Dials(s.Clients(), "udp", v4)...)...)

	var second []*scene.Connection
	for range 2 {
		web = s.ChangeService(t, "web", func(svc *corev1.Service) {
			svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicyPreferDualStack)
		})
		if len(web.Spec.ClusterIPs) != 2 {
			t.Fatalf("the API server gave it %v, want two addresses", web.Spec.ClusterIPs)
		}
		v6 := scene.At(web.Spec.ClusterIPs[1], 80)
		for _, c := range s.Clients() {
			scene.MustReach(t, c.To("tcp", v6), here.Name, there.Name)
			scene.MustReach(t, c.To("tcp", number), here.Name, there.Name)
		}
		second = append(second, scene.MustOpenAll(t, s.Clients(), v6, "tcp")...)
		second = append(second, scene.MustOpenAll(t, s.Clients(), number, "tcp")...)

		s.ChangeService(t, "web", func(svc *corev1.Service) {
			svc.Spec.IPFamilyPolicy = new(corev1.IPFamilyPolicySingleStack)
			svc.Spec.IPFamilies, svc.Spec.ClusterIPs = svc.Spec.IPFamilies[:1], svc.Spec.ClusterIPs[:1]
		})
		scene.MustAllFail(t, scene.Dropped, scene.Dials(s.Clients(), "udp", v6)...)
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", number)...)
		scene.MustGoOn(t, first...)
		scene.MustGoOn(t, second...)
	}
	load.MustHaveWorked(t)
}
