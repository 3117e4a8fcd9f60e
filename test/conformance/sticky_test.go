package conformance

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
)

const forever = 10800 // seconds, the API's default

// sticky is a Service of many ports with session affinity. Each port has an
// affinity of its own for each client, so that all their affinities are the client's own.
//
//	clients ──── web:1000 to web:1011, at all its addresses ─┬─ pod-1-0 to pod-1-3
//	                                                         └─ pod-2-0 to pod-2-3
type sticky struct {
	*scene.Scene
	service   *corev1.Service
	vip       string
	endpoints []*lab.Pod
}

const stickyPorts = 12

func mustStick(t *testing.T, s *scene.Scene, seconds int32) *sticky {
	t.Helper()
	k := &sticky{Scene: s, endpoints: append(s.Local(), s.Remote()...)}
	k.vip, _ = scene.VirtualIPs()
	k.set(t, scene.ReadyAll(k.endpoints...)...)
	k.service = s.CreateService(t, "web", scene.LoadBalancer, scene.Affinity(seconds), func(svc *corev1.Service) {
		svc.Spec.Ports = nil
		for i := range int32(stickyPorts) {
			svc.Spec.Ports = append(svc.Spec.Ports, corev1.ServicePort{Name: portName(i), Port: 1000 + i})
		}
	})
	s.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: k.vip})
	for _, c := range s.Clients() {
		for _, address := range k.addresses(0) {
			lab.Eventually(t, address+" is programmed", func() bool {
				_, err := c.To("tcp", address).Ask()

				return err == nil
			})
		}
	}

	return k
}

func portName(i int32) string { return fmt.Sprintf("p%d", i) }

// set writes the endpoints of all ports.
func (k *sticky) set(t *testing.T, endpoints ...scene.Endpoint) {
	t.Helper()
	slice := k.Slice("web", discoveryv1.AddressTypeIPv4, endpoints...)
	slice.Ports = nil
	for i := range int32(stickyPorts) {
		slice.Ports = append(slice.Ports, object.EndpointPort(portName(i), corev1.ProtocolTCP, scene.PodPort))
	}
	k.PutSlice(t, slice)
}

// addresses are those of a port.
func (k *sticky) addresses(i int) []string {
	port := k.service.Spec.Ports[i]

	return []string{
		scene.At(k.service.Spec.ClusterIP, port.Port),
		scene.At(k.Lab.Nodes[0].IPv4.String(), port.NodePort),
		scene.At(k.vip, port.Port),
	}
}

// memory is the backend that answers a client, by port.
func (k *sticky) memory(t *testing.T, c *scene.Client) []string {
	t.Helper()
	var names []string
	for i := range stickyPorts {
		names = append(names, c.To("tcp", k.addresses(i)[0]).MustAsk(t).Name)
	}

	return names
}

// allBut are all endpoints, ready, but one, which is something else.
func (k *sticky) allBut(name string, is scene.Condition) []scene.Endpoint {
	endpoints := scene.ReadyAll(k.endpoints...)
	for i := range endpoints {
		if endpoints[i].Pod.Name == name {
			endpoints[i].Is = is
		}
	}

	return endpoints
}
