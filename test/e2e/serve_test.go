package e2e

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
)

// A Service is created, and every client reaches all its backends by all its
// addresses, in milliseconds.
//
//	web 10.96.x.y:80, [fd00:10:96::z]:80, node ports ─┬─ pod-1-1, pod-1-2
//	                                                  └─ pod-2-0, pod-2-1, pod-2-2
func TestAddresses(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "web", readyAll(s.pods()...)...)
	web := s.createService(t, "web", func(spec *corev1.ServiceSpec) { spec.Type = corev1.ServiceTypeNodePort })
	v4, v6 := web.Spec.ClusterIPs[0], web.Spec.ClusterIPs[1]
	first := mustReach(t, dial{s.pod, "tcp", at(v4, 80)}, names(s.pods()...)...)
	t.Logf("the first answer came %v after the Service was created", first)

	self := s.lab.Nodes[0]
	for _, test := range []struct {
		name    string
		from    *lab.Caller
		address string
	}{
		{"pod, IPv4", s.pod, v4},
		{"pod, IPv6", s.pod, v6},
		{"node, IPv4", s.node, v4},
		{"node, IPv6", s.node, v6},
		{"node port of a pod, IPv4", s.pod, self.IPv4.String()},
		{"node port of a pod, IPv6", s.pod, self.IPv6.String()},
		{"node port of the node, IPv4", s.node, self.IPv4.String()},
		{"node port of the node, IPv6", s.node, self.IPv6.String()},
		{"node port on localhost, IPv4", s.node, "127.0.0.1"},
		{"node port on localhost, IPv6", s.node, "::1"},
	} {
		for i, network := range []string{"tcp", "udp"} {
			t.Run(fmt.Sprintf("%s, %s", test.name, network), func(t *testing.T) {
				port := web.Spec.Ports[i].Port
				if test.address != v4 && test.address != v6 {
					port = web.Spec.Ports[i].NodePort
				}
				mustReach(t, dial{test.from, network, at(test.address, port)}, names(s.pods()...)...)
			})
		}
	}
}
