package e2e

import (
	"fmt"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

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

// The slices of one Service come and go, in every order, and endpoints move
// between them.
//
//	web:80 ─┬─ web-a: pod-1-0, pod-1-1
//	        └─ web-b: pod-1-1, pod-2-0
func TestSlices(t *testing.T) {
	const v4 = discoveryv1.AddressTypeIPv4
	s := mustTestbed(t)
	one, two, three := s.Local()[0], s.Local()[1], s.Remote()[0]
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	web := s.Pod.To("tcp", ip)

	for _, step := range []struct {
		name string
		do   func()
		want []string // none: refused
	}{
		{"no slice", func() {}, nil},
		{"an empty slice", func() { s.setSlice(t, "web-a", "web", v4) }, nil},
		{"a slice", func() { s.setSlice(t, "web-a", "web", v4, scene.ReadyAll(one, two)...) }, scene.Names(one, two)},
		{"a second slice that has one of them too", func() {
			s.setSlice(t, "web-b", "web", v4, scene.ReadyAll(two, three)...)
		}, scene.Names(one, two, three)},
		{"both go from the first", func() { s.setSlice(t, "web-a", "web", v4) }, scene.Names(two, three)},
		{"one moves, and is in both for a moment", func() {
			s.setSlice(t, "web-a", "web", v4, scene.ReadyAll(three)...)
			s.setSlice(t, "web-b", "web", v4, scene.ReadyAll(two)...)
		}, scene.Names(two, three)},
		{"an older copy is draining", func() {
			s.setSlice(t, "web-b", "web", v4, scene.Endpoint{Pod: two, Is: scene.Ready}, scene.Endpoint{Pod: three, Is: scene.Draining})
		}, scene.Names(two, three)},
		{"a slice becomes another Service's", func() { s.setSlice(t, "web-a", "other", v4, scene.ReadyAll(three)...) }, scene.Names(two)},
		{"a slice goes", func() { s.DeleteSlice(t, "web-b") }, nil},
		{"one of the other family only", func() {
			s.setSlice(t, "web-c", "web", discoveryv1.AddressTypeIPv6, scene.ReadyAll(one)...)
		}, nil},
		{"the first comes back", func() { s.setSlice(t, "web-a", "web", v4, scene.ReadyAll(one)...) }, scene.Names(one)},
	} {
		t.Run(step.name, func(t *testing.T) {
			step.do()
			if step.want == nil {
				scene.MustFail(t, web, scene.Rejected)
			} else {
				scene.MustReach(t, web, step.want...)
			}
		})
	}
}

// While an endpoint moves from one slice to another, as the endpoint controller
// moves it, clients do not notice.
//
//	web:80 ── pod-1-0, now in web-a, now in web-b
func TestSlicesUnderLoad(t *testing.T) {
	const v4 = discoveryv1.AddressTypeIPv4
	s := mustTestbed(t)
	pod := s.Local()[0]
	s.setSlice(t, "web-a", "web", v4, scene.ReadyAll(pod)...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), pod.Name)
	load := scene.MustDial(t, 200, s.Pod.To("tcp", ip), s.Node.To("tcp", ip))
	for range 20 {
		s.setSlice(t, "web-b", "web", v4, scene.ReadyAll(pod)...)
		s.setSlice(t, "web-a", "web", v4)
		s.setSlice(t, "web-a", "web", v4, scene.ReadyAll(pod)...)
		s.DeleteSlice(t, "web-b")
	}
	load.MustKeepUp(t)
}
