package e2e

import (
	"context"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// With internalTrafficPolicy Local, clients of the ClusterIP stay on their
// node. It does not apply to node ports.
//
//	web:80 ─┬─ pod-1-0
//	        └─ pod-2-0
func TestInternalTrafficPolicy(t *testing.T) {
	s := mustTestbed(t)
	here, there := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(here, there)...)
	web := s.CreateService(t, "web", func(svc *corev1.Service) {
		svc.Spec.Type = corev1.ServiceTypeNodePort
		svc.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	})
	ip, nodePort := scene.At(web.Spec.ClusterIPs[0], 80), scene.At("127.0.0.1", web.Spec.Ports[0].NodePort)
	scene.MustReach(t, s.Pod.To("tcp", ip), here.Name)
	scene.MustReach(t, s.Node.To("udp", ip), here.Name)
	scene.MustReach(t, s.Node.To("tcp", nodePort), here.Name, there.Name)

	s.SetEndpoints(t, "web", scene.ReadyAll(there)...)
	scene.MustFail(t, s.Pod.To("tcp", ip), scene.Dropped)
	scene.MustReach(t, s.Node.To("tcp", nodePort), there.Name)
	s.ChangeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	})
	scene.MustReach(t, s.Pod.To("tcp", ip), there.Name)
}

// Endpoints are hinted for zones, and the node moves from one to the other.
//
//	web:80 ─┬─ pod-1-0  for zone a
//	        └─ pod-2-0  for zone b
func TestZones(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	a, b := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web",
		scene.Endpoint{Pod: a, Is: scene.Ready, Zones: []string{"a"}},
		scene.Endpoint{Pod: b, Is: scene.Ready, Zones: []string{"b"}})
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), a.Name, b.Name) // the node has no zone

	for _, test := range []struct {
		zone string
		want []string
	}{
		{"a", scene.Names(a)}, {"b", scene.Names(b)}, {"c", scene.Names(a, b)}, {"a", scene.Names(a)},
	} {
		s.LabelNode(t, self, corev1.LabelTopologyZone, test.zone)
		scene.MustReach(t, s.Pod.To("tcp", ip), test.want...)
		scene.MustReach(t, s.Node.To("udp", ip), test.want...)
	}
	s.SetEndpoints(t, "web", scene.Endpoint{Pod: a, Is: scene.Ready, Zones: []string{"a"}}, scene.Endpoint{Pod: b, Is: scene.Ready})
	scene.MustReach(t, s.Pod.To("tcp", ip), a.Name, b.Name) // one without a hint: none counts
}

// While a ServiceCIDR exists, packets to its addresses that are no Service's are dropped.
//
//	pod ────── 10.99.0.7:80 ── no Service
func TestServiceCIDR(t *testing.T) {
	s := mustTestbed(t)
	outside := s.Pod.To("tcp", "10.99.0.7:80")
	scene.MustFail(t, outside, scene.Untouched) // it went to the gateway
	cidrs := s.Client.NetworkingV1().ServiceCIDRs()
	_, err := cidrs.Create(t.Context(), object.ServiceCIDR(s.Namespace, "10.99.0.0/16"), metav1.CreateOptions{})
	lab.Must(t, err)
	t.Cleanup(func() { _ = cidrs.Delete(context.Background(), s.Namespace, metav1.DeleteOptions{}) })
	scene.MustFail(t, outside, scene.Dropped)

	lab.Must(t, cidrs.Delete(t.Context(), s.Namespace, metav1.DeleteOptions{}))
	scene.MustFail(t, outside, scene.Untouched)
}
