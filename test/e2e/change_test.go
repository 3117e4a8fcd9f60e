package e2e

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// A Service is deleted, and its address with it; created again, it has another one.
//
//	web:80 ─┬─ pod-1-0 to pod-1-2
//	        └─ pod-2-0, pod-2-1, pod-2-2
func TestDeletedAndCreatedAgain(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	old := s.CreateService(t, "web").Spec.ClusterIPs[0]
	scene.MustReach(t, s.Pod.To("tcp", scene.At(old, 80)), scene.Names(s.pods()...)...)
	scene.MustFail(t, s.Pod.To("tcp", scene.At(old, 81)), scene.Rejected) // no port of the Service
	s.DeleteService(t, "web")
	scene.MustFail(t, s.Pod.To("tcp", scene.At(old, 80)), scene.Dropped) // no Service's, in a ServiceCIDR
	scene.MustFail(t, s.Node.To("udp", scene.At(old, 80)), scene.Dropped)

	s.CreateService(t, "other", func(svc *corev1.Service) { svc.Spec.ClusterIP = old })
	again := s.CreateService(t, "web").Spec.ClusterIPs[0]
	scene.MustReach(t, s.Pod.To("tcp", scene.At(again, 80)), scene.Names(s.pods()...)...)
	scene.MustFail(t, s.Pod.To("tcp", scene.At(old, 80)), scene.Rejected) // other's, which has no endpoints
}

// The ports of a Service change: their names, which endpoints join on, and
// their numbers.
//
//	web:80 ── pod-1-0
func TestPorts(t *testing.T) {
	s := mustTestbed(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	ip := s.CreateService(t, "web").Spec.ClusterIPs[0]
	scene.MustReach(t, s.Pod.To("tcp", scene.At(ip, 80)), pod.Name)

	s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Name = "renamed" })
	scene.MustFail(t, s.Pod.To("tcp", scene.At(ip, 80)), scene.Rejected)
	scene.MustReach(t, s.Pod.To("udp", scene.At(ip, 80)), pod.Name)
	s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Name = "tcp" })
	scene.MustReach(t, s.Pod.To("tcp", scene.At(ip, 80)), pod.Name)
	s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 8000 })
	scene.MustReach(t, s.Pod.To("tcp", scene.At(ip, 8000)), pod.Name)
	scene.MustFail(t, s.Pod.To("tcp", scene.At(ip, 80)), scene.Rejected)
}

// A Service is a ClusterIP, gets a node port, becomes a LoadBalancer, and is a
// ClusterIP in the end, which is reached all the time.
//
//	web:80, node-1:port, 203.0.113.7:80, 198.51.100.7:80 ─┬─ pod-1-0
//	                                                      └─ pod-2-0
func TestTypes(t *testing.T) {
	s := mustTestbed(t)
	pods := scene.Names(s.Local()[0], s.Remote()[0])
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), pods...)
	load := scene.MustDial(t, 100, s.Pod.To("tcp", ip), s.Node.To("udp", ip))

	web := s.ChangeService(t, "web", scene.NodePort)
	nodePort := scene.At(s.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
	scene.MustReach(t, s.Pod.To("tcp", nodePort), pods...)

	const external, balancer = "198.51.100.7:80", "203.0.113.7:80"
	s.ChangeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.ExternalIPs = []string{"198.51.100.7"}
	})
	scene.MustReach(t, s.Node.To("tcp", external), pods...)
	scene.MustFail(t, s.Pod.To("tcp", balancer), scene.Untouched) // not yet
	s.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "203.0.113.7"})
	for _, address := range []string{ip, nodePort, balancer, external} {
		scene.MustReach(t, s.Pod.To("tcp", address), pods...)
		scene.MustReach(t, s.Node.To("tcp", address), pods...)
	}
	// Traffic to an ingress of mode Proxy is the load balancer's: KEP-1860.
	s.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "203.0.113.7", IPMode: new(corev1.LoadBalancerIPModeProxy)})
	scene.MustFail(t, s.Pod.To("tcp", balancer), scene.Untouched)

	s.ChangeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.Type = corev1.ServiceTypeClusterIP
		svc.Spec.ExternalIPs = nil
		svc.Spec.AllocateLoadBalancerNodePorts = nil
	})
	scene.MustFail(t, s.Node.To("tcp", nodePort), scene.Rejected) // by the node: no process listens
	scene.MustFail(t, s.Pod.To("tcp", external), scene.Untouched)
	load.MustKeepUp(t)
}

// A load balancer whose address is loopback (as minikube's tunnel writes it) takes neither the
// localhost of pods nor that of the node.
//
//	web:80, 203.0.113.7:80 ── pod-1-0
func TestLoopbackOfLoadBalancer(t *testing.T) {
	s := mustTestbed(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	s.CreateService(t, "web", func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeLoadBalancer })
	s.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "127.0.0.1"}, corev1.LoadBalancerIngress{IP: "::1"},
		corev1.LoadBalancerIngress{IP: "203.0.113.7"})
	scene.MustReach(t, s.Pod.To("tcp", "203.0.113.7:80"), pod.Name)
	for _, client := range []*scene.Client{s.Pod, s.Node} {
		for _, address := range []string{"127.0.0.1:80", "[::1]:80", "0.0.0.0:80", "[::]:80", "[::ffff:127.0.0.1]:80"} {
			scene.MustFail(t, client.To("tcp", address), scene.Rejected) // no process listens
		}
	}
}

// A Service with the label of another proxy is withdrawn, and served again without it. Meanwhile what dials it is
// the other proxy's, and not dropped.
//
//	web:80 ── pod-1-0
func TestOtherProxy(t *testing.T) {
	s := mustTestbed(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	ip := scene.At(s.CreateService(t, "web", withExternalIP("198.51.100.8")).Spec.ClusterIPs[0], 80)
	const external = "198.51.100.8:80"
	label := func(svc *corev1.Service) {
		svc.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": ""}
	}
	for range 2 {
		scene.MustReach(t, s.Pod.To("tcp", ip), pod.Name)
		scene.MustReach(t, s.Node.To("tcp", external), pod.Name)
		s.ChangeService(t, "web", label)
		scene.MustFail(t, s.Pod.To("tcp", ip), scene.Untouched)
		scene.MustFail(t, s.Node.To("tcp", external), scene.Untouched)
		s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Labels = nil })
	}
	scene.MustReach(t, s.Pod.To("tcp", ip), pod.Name)
}

func withExternalIP(ip string) scene.Change {
	return func(svc *corev1.Service) { svc.Spec.ExternalIPs = []string{ip} }
}

// Session affinity is switched on and off: clients are network namespaces.
//
//	pod, node-1 ────── web:80 ─┬─ pod-1-0 to pod-1-2
//	                           └─ pod-2-0, pod-2-1, pod-2-2
func TestSessionAffinity(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	for range 2 {
		for _, from := range []*scene.Client{s.Pod, s.Node} {
			scene.MustReach(t, from.To("tcp", ip), scene.Names(s.pods()...)...)
		}
		s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
		for _, from := range []*scene.Client{s.Pod, s.Node} {
			var first string
			lab.Eventually(t, "a client keeps its backend", func() bool {
				first = from.To("tcp", ip).MustAsk(t).Name

				return from.To("tcp", ip).Reaches(first) == nil
			})
			scene.MustReach(t, scene.MustClientIn(t, "another", from.Namespace, s.Cgroup).To("tcp", ip), first) // another process of the same client
		}
		s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityNone })
	}
	scene.MustReach(t, s.Pod.To("tcp", ip), scene.Names(s.pods()...)...)
}
