package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// A Service is created, and every client reaches all its backends by all its
// addresses, in milliseconds.
//
//	web 10.96.x.y:80, [fd00:10:96::z]:80, node ports ─┬─ pod-1-0 to pod-1-2
//	                                                  └─ pod-2-0, pod-2-1, pod-2-2
func TestAddresses(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	web := s.CreateService(t, "web", scene.NodePort)
	v4, v6 := web.Spec.ClusterIPs[0], web.Spec.ClusterIPs[1]
	created := time.Now()
	lab.Eventually(t, "a backend answers", func() bool {
		_, err := s.Pod.To("tcp", scene.At(v4, 80)).Ask()

		return err == nil
	})
	t.Logf("the first answer came %v after the Service was created", time.Since(created))
	scene.MustReach(t, s.Pod.To("tcp", scene.At(v4, 80)), scene.Names(s.pods()...)...)

	self := s.Lab.Nodes[0]
	for _, test := range []struct {
		name    string
		from    *scene.Client
		address string
	}{
		{"pod, IPv4", s.Pod, v4},
		{"pod, IPv6", s.Pod, v6},
		{"node, IPv4", s.Node, v4},
		{"node, IPv6", s.Node, v6},
		{"node port of a pod, IPv4", s.Pod, self.IPv4.String()},
		{"node port of a pod, IPv6", s.Pod, self.IPv6.String()},
		{"node port of the node, IPv4", s.Node, self.IPv4.String()},
		{"node port of the node, IPv6", s.Node, self.IPv6.String()},
		{"node port on localhost, IPv4", s.Node, "127.0.0.1"},
		{"node port on localhost, IPv6", s.Node, "::1"},
	} {
		for i, network := range []string{"tcp", "udp"} {
			t.Run(fmt.Sprintf("%s, %s", test.name, network), func(t *testing.T) {
				port := web.Spec.Ports[i].Port
				if test.address != v4 && test.address != v6 {
					port = web.Spec.Ports[i].NodePort
				}
				scene.MustReach(t, test.from.To(network, scene.At(test.address, port)), scene.Names(s.pods()...)...)
			})
		}
	}
}
