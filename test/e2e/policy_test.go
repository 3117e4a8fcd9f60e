package e2e

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// With internalTrafficPolicy Local, clients of the ClusterIP stay on their
// node. Node ports do not care.
//
//	web:80 ─┬─ pod-1-1
//	        └─ pod-2-0
func TestInternalTrafficPolicy(t *testing.T) {
	s := mustScene(t)
	here, there := s.local()[0], s.remote()[0]
	s.setEndpoints(t, "web", readyAll(here, there)...)
	web := s.createService(t, "web", func(spec *corev1.ServiceSpec) {
		spec.Type = corev1.ServiceTypeNodePort
		spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyLocal)
	})
	ip, nodePort := at(web.Spec.ClusterIPs[0], 80), at("127.0.0.1", web.Spec.Ports[0].NodePort)
	mustReach(t, dial{s.pod, "tcp", ip}, here.Name)
	mustReach(t, dial{s.node, "udp", ip}, here.Name)
	mustReach(t, dial{s.node, "tcp", nodePort}, here.Name, there.Name)

	s.setEndpoints(t, "web", readyAll(there)...)
	mustFail(t, dial{s.pod, "tcp", ip}, unix.EHOSTUNREACH)
	mustReach(t, dial{s.node, "tcp", nodePort}, there.Name)
	s.changeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.InternalTrafficPolicy = new(corev1.ServiceInternalTrafficPolicyCluster)
	})
	mustReach(t, dial{s.pod, "tcp", ip}, there.Name)
}

// Endpoints are hinted for zones, and the node moves from one to the other.
//
//	web:80 ─┬─ pod-1-1  for zone a
//	        └─ pod-2-0  for zone b
func TestZones(t *testing.T) {
	s := mustScene(t)
	self := s.lab.Nodes[0]
	a, b := s.local()[0], s.remote()[0]
	s.setEndpoints(t, "web",
		endpoint{pod: a, is: ready, zones: []string{"a"}},
		endpoint{pod: b, is: ready, zones: []string{"b"}})
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, a.Name, b.Name) // the node has no zone

	for _, test := range []struct {
		zone string
		want []string
	}{
		{"a", names(a)}, {"b", names(b)}, {"c", names(a, b)}, {"a", names(a)},
	} {
		s.labelNode(t, self, corev1.LabelTopologyZone, test.zone)
		mustReach(t, dial{s.pod, "tcp", ip}, test.want...)
		mustReach(t, dial{s.node, "udp", ip}, test.want...)
	}
	s.setEndpoints(t, "web", endpoint{pod: a, is: ready, zones: []string{"a"}}, endpoint{pod: b, is: ready})
	mustReach(t, dial{s.pod, "tcp", ip}, a.Name, b.Name) // one without a hint: none counts
}

// While a ServiceCIDR exists, packets to its addresses that are no Service's are dropped.
//
//	pod-1-0 ── 10.99.0.7:80 ── no Service
func TestServiceCIDR(t *testing.T) {
	s := mustScene(t)
	outside := dial{s.pod, "tcp", "10.99.0.7:80"}
	mustFail(t, outside, unix.ETIMEDOUT) // it went to the gateway
	cidrs := s.client.NetworkingV1().ServiceCIDRs()
	_, err := cidrs.Create(t.Context(), &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: s.namespace},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.99.0.0/16"}},
	}, metav1.CreateOptions{})
	must(t, err)
	t.Cleanup(func() { _ = cidrs.Delete(context.Background(), s.namespace, metav1.DeleteOptions{}) })
	mustFail(t, outside, unix.EHOSTUNREACH)

	must(t, cidrs.Delete(t.Context(), s.namespace, metav1.DeleteOptions{}))
	mustFail(t, outside, unix.ETIMEDOUT)
}
