package e2e

import (
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// A Service goes, and its address with it; created again, it has another one.
//
//	web:80 ─┬─ pod-1-1, pod-1-2
//	        └─ pod-2-0, pod-2-1, pod-2-2
func TestDeletedAndCreatedAgain(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "web", readyAll(s.pods()...)...)
	old := s.createService(t, "web").Spec.ClusterIPs[0]
	mustReach(t, dial{s.pod, "tcp", at(old, 80)}, names(s.pods()...)...)
	mustFail(t, dial{s.pod, "tcp", at(old, 81)}, unix.ECONNREFUSED) // no port of the Service
	s.deleteService(t, "web")
	mustFail(t, dial{s.pod, "tcp", at(old, 80)}, unix.EHOSTUNREACH) // no Service's, in a ServiceCIDR
	mustFail(t, dial{s.node, "udp", at(old, 80)}, unix.EHOSTUNREACH)

	s.createService(t, "other", func(spec *corev1.ServiceSpec) { spec.ClusterIP = old })
	again := s.createService(t, "web").Spec.ClusterIPs[0]
	mustReach(t, dial{s.pod, "tcp", at(again, 80)}, names(s.pods()...)...)
	mustFail(t, dial{s.pod, "tcp", at(old, 80)}, unix.ECONNREFUSED) // other's, which has no endpoints
}

// The ports of a Service change: their names, which endpoints join on, and
// their numbers.
//
//	web:80 ── pod-1-1
func TestPorts(t *testing.T) {
	s := mustScene(t)
	pod := s.local()[0]
	s.setEndpoints(t, "web", readyAll(pod)...)
	ip := s.createService(t, "web").Spec.ClusterIPs[0]
	mustReach(t, dial{s.pod, "tcp", at(ip, 80)}, pod.Name)

	s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Name = "renamed" })
	mustFail(t, dial{s.pod, "tcp", at(ip, 80)}, unix.ECONNREFUSED)
	mustReach(t, dial{s.pod, "udp", at(ip, 80)}, pod.Name)
	s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Name = "tcp" })
	mustReach(t, dial{s.pod, "tcp", at(ip, 80)}, pod.Name)
	s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 8000 })
	mustReach(t, dial{s.pod, "tcp", at(ip, 8000)}, pod.Name)
	mustFail(t, dial{s.pod, "tcp", at(ip, 80)}, unix.ECONNREFUSED)
}

// A Service is a ClusterIP, gets a node port, becomes a LoadBalancer, and is a
// ClusterIP in the end, which is reached all the time.
//
//	web:80, node-1:port, 203.0.113.7:80, 198.51.100.7:80 ─┬─ pod-1-1
//	                                                      └─ pod-2-0
func TestTypes(t *testing.T) {
	s := mustScene(t)
	pods := names(s.local()[0], s.remote()[0])
	s.setEndpoints(t, "web", readyAll(s.local()[0], s.remote()[0])...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, pods...)
	load := mustDial(t, 100, dial{s.pod, "tcp", ip}, dial{s.node, "udp", ip})

	web := s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.Type = corev1.ServiceTypeNodePort })
	nodePort := at(s.lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
	mustReach(t, dial{s.pod, "tcp", nodePort}, pods...)

	const external, balancer = "198.51.100.7:80", "203.0.113.7:80"
	s.changeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.ExternalIPs = []string{"198.51.100.7"}
	})
	mustReach(t, dial{s.node, "tcp", external}, pods...)
	mustFail(t, dial{s.pod, "tcp", balancer}, unix.ETIMEDOUT) // not yet
	s.setLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "203.0.113.7"})
	for _, address := range []string{ip, nodePort, balancer, external} {
		mustReach(t, dial{s.pod, "tcp", address}, pods...)
		mustReach(t, dial{s.node, "tcp", address}, pods...)
	}
	// Traffic to an ingress of mode Proxy is the load balancer's: KEP-1860.
	s.setLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "203.0.113.7", IPMode: new(corev1.LoadBalancerIPModeProxy)})
	mustFail(t, dial{s.pod, "tcp", balancer}, unix.ETIMEDOUT)

	s.changeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.Type = corev1.ServiceTypeClusterIP
		svc.Spec.ExternalIPs = nil
		svc.Spec.AllocateLoadBalancerNodePorts = nil
	})
	mustFail(t, dial{s.node, "tcp", nodePort}, unix.ECONNREFUSED) // by the node: no process listens
	mustFail(t, dial{s.pod, "tcp", external}, unix.ETIMEDOUT)
	load.mustHaveWorked(t)
}

// A Service that another proxy serves is left alone, and taken back.
//
//	web:80 ── pod-1-1
func TestOtherProxy(t *testing.T) {
	s := mustScene(t)
	pod := s.local()[0]
	s.setEndpoints(t, "web", readyAll(pod)...)
	ip := at(s.createService(t, "web", withExternalIP("198.51.100.8")).Spec.ClusterIPs[0], 80)
	const external = "198.51.100.8:80"
	label := func(svc *corev1.Service) {
		svc.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": ""}
	}
	for range 2 {
		mustReach(t, dial{s.pod, "tcp", ip}, pod.Name)
		mustReach(t, dial{s.node, "tcp", external}, pod.Name)
		s.changeService(t, "web", label)
		mustFail(t, dial{s.pod, "tcp", ip}, unix.EHOSTUNREACH)
		mustFail(t, dial{s.node, "tcp", external}, unix.ETIMEDOUT)
		s.changeService(t, "web", func(svc *corev1.Service) { svc.Labels = nil })
	}
	mustReach(t, dial{s.pod, "tcp", ip}, pod.Name)
}

func withExternalIP(ip string) func(*corev1.ServiceSpec) {
	return func(spec *corev1.ServiceSpec) { spec.ExternalIPs = []string{ip} }
}

// Session affinity is switched on and off: clients are network namespaces.
//
//	pod-1-0, node-1 ── web:80 ─┬─ pod-1-1, pod-1-2
//	                           └─ pod-2-0, pod-2-1, pod-2-2
func TestSessionAffinity(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "web", readyAll(s.pods()...)...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	for range 2 {
		for _, from := range []*lab.Caller{s.pod, s.node} {
			mustReach(t, dial{from, "tcp", ip}, names(s.pods()...)...)
		}
		s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
		for _, from := range []*lab.Caller{s.pod, s.node} {
			var first string
			eventually(t, "a client keeps its backend", func() bool {
				var err error
				if first, err = (dial{from, "tcp", ip}).ask(); err != nil {
					t.Fatal(err)
				}

				return dial{from, "tcp", ip}.reaches([]string{first}, func() {}) == nil
			})
			mustReach(t, dial{s.caller(t, namespaceOf(s, from)), "tcp", ip}, first) // another process of the same client
		}
		s.changeService(t, "web", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityNone })
	}
	mustReach(t, dial{s.pod, "tcp", ip}, names(s.pods()...)...)
}

// namespaceOf is where a client of the scene is.
func namespaceOf(s *scene, from *lab.Caller) *lab.Namespace {
	if from == s.node {
		return s.lab.Nodes[0].Namespace
	}

	return s.lab.Nodes[0].Pods[0].Namespace
}
