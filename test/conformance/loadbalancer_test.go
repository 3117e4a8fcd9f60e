package conformance

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// balanced is a Service of type LoadBalancer with an address of each family, and
// external IPs.
//
//	clients ──── web:80 ─┬─ pod-1-0
//	                     └─ pod-2-0
type balanced struct {
	*scene.Scene
	service         *corev1.Service
	vips, externals [2]string
	here, there     *lab.Pod
	another         *scene.Client // outside, by another address
}

func mustBalance(t *testing.T, changes ...scene.Change) *balanced {
	t.Helper()
	b := &balanced{Scene: scene.MustShare(t)}
	b.here, b.there = b.Local()[0], b.Remote()[0]
	from := *b.Outside
	from.Name, from.IPv4, from.IPv6 = "another", b.Lab.Client.IPv4, b.Lab.Client.IPv6
	b.another = &from
	b.vips[0], b.vips[1] = scene.VirtualIPs()
	b.externals[0], b.externals[1] = scene.VirtualIPs()
	b.SetEndpoints(t, "web", scene.ReadyAll(b.here, b.there)...)
	changes = append([]scene.Change{scene.LoadBalancer, scene.ExternalIPs(b.externals[:]...)}, changes...)
	b.service = b.CreateService(t, "web", changes...)
	b.setIngress(t, nil)

	return b
}

// setIngress writes the status with the addresses, as the cloud controller does.
func (b *balanced) setIngress(t *testing.T, mode *corev1.LoadBalancerIPMode) {
	t.Helper()
	b.SetLoadBalancer(t, "web",
		corev1.LoadBalancerIngress{Hostname: "lb.example"},
		corev1.LoadBalancerIngress{IP: b.vips[0], IPMode: mode},
		corev1.LoadBalancerIngress{IP: b.vips[1], IPMode: mode})
}

// nodePort is one of the addresses that the Service has.
func (b *balanced) nodePort() string {
	return scene.At(b.Lab.Nodes[0].IPv4.String(), b.service.Spec.Ports[0].NodePort)
}

// mustReachBoth waits until both backends answer every client.
func (b *balanced) mustReachBoth(t *testing.T, address string) {
	t.Helper()
	for _, c := range b.Clients() {
		scene.MustReach(t, c.To("tcp", address), b.here.Name, b.there.Name)
	}
}

// Pods and processes of the node reach a load balancer's address, and external
// IPs, without a route to them; so do clients outside with a route by the node.
func TestLoadBalancer(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	for _, ip := range append(b.vips[:], b.externals[:]...) {
		b.mustReachBoth(t, scene.At(ip, 80))
		for _, c := range b.Clients() {
			scene.MustReach(t, c.To("udp", scene.At(ip, 80)), b.here.Name, b.there.Name)
		}
	}

	b.ChangeService(t, "web", scene.ExternalLocal)
	for _, ip := range b.vips {
		d := b.Outside.To("tcp", scene.At(ip, 80))
		scene.MustReach(t, d, b.here.Name)
		if got := d.MustAsk(t).Client.Addr(); got != b.Outside.IPv4 && got != b.Outside.IPv6 {
			t.Errorf("%s: %s saw %s, want the client", d, b.here.Name, got)
		}
		for _, c := range []*scene.Client{b.Pod, b.Guest, b.Node} {
			scene.MustReach(t, c.To("tcp", scene.At(ip, 80)), b.here.Name, b.there.Name)
		}
	}
}

// Other ports of a load balancer's address and of external IPs are no Service's; if
// the node has the address, its processes answer there. The node port is one of
// those other ports.
func TestUnusedPortsOfVirtualIPs(t *testing.T) {
	t.Parallel()
	b := mustBalance(t)
	number := b.service.Spec.Ports[0].NodePort
	for _, ip := range []string{b.vips[0], b.externals[0]} {
		b.mustReachBoth(t, scene.At(ip, 80))
		scene.MustAllFail(t, scene.Untouched,
			b.Guest.To("udp", scene.At(ip, 81)), b.Guest.To("udp", scene.At(ip, number)),
			b.Node.To("tcp", scene.At(ip, 81)), b.Node.To("tcp", scene.At(ip, number)))
		self := b.Lab.Nodes[0]
		bound := netip.MustParsePrefix(ip + "/32")
		lab.Must(t, self.AddAddress("lo", bound))
		t.Cleanup(func() { lab.Must(t, self.RemoveAddress("lo", bound)) })
		lab.MustServe(t, self.Namespace, dialHost, scene.At(ip, 81), scene.At(ip, number))
		for _, c := range b.Clients() {
			scene.MustReach(t, c.To("tcp", scene.At(ip, 81)), dialHost)
			scene.MustReach(t, c.To("udp", scene.At(ip, number)), dialHost)
		}
		b.mustReachBoth(t, scene.At(ip, 80))
	}
}

// An address of mode Proxy is the load balancer's own: KEP-1860. Sluice does not touch
// traffic to it, nor does it check source ranges there.
func TestIPModeProxy(t *testing.T) {
	t.Parallel()
	b := mustBalance(t, scene.SourceRanges("198.18.0.0/15", "2001:db8:1::/48"))
	vip := scene.At(b.vips[0], 80)
	scene.MustAllFail(t, scene.Dropped, scene.Dials(b.Clients(), "tcp", vip)...) // by the ranges
	b.setIngress(t, new(corev1.LoadBalancerIPModeProxy))
	scene.MustAllFail(t, scene.Untouched, b.Pod.To("tcp", vip), b.Node.To("tcp", vip))
	// The answer of a server outside shows that the traffic is not touched.
	self := b.Lab.Nodes[0]
	bound := netip.MustParsePrefix(b.vips[0] + "/32")
	lab.Must(t, self.AddAddress("lo", bound))
	t.Cleanup(func() { lab.Must(t, self.RemoveAddress("lo", bound)) })
	lab.MustServe(t, self.Namespace, dialHost, vip)
	for _, c := range b.Clients() {
		scene.MustReach(t, c.To("tcp", vip), dialHost)
	}
	b.mustReachBoth(t, b.nodePort())
	b.mustReachBoth(t, scene.At(b.service.Spec.ClusterIPs[0], 80))
	b.ChangeService(t, "web", scene.SourceRanges())
	b.setIngress(t, new(corev1.LoadBalancerIPModeVIP))
	b.mustReachBoth(t, vip)
}

// A load balancer that needs no node ports has none, and works.
func TestNoNodePorts(t *testing.T) {
	t.Parallel()
	b := mustBalance(t, func(svc *corev1.Service) { svc.Spec.AllocateLoadBalancerNodePorts = new(false) })
	if number := b.service.Spec.Ports[0].NodePort; number != 0 {
		t.Fatalf("the API server gave it node port %d", number)
	}
	b.mustReachBoth(t, scene.At(b.vips[0], 80))
	b.mustReachBoth(t, scene.At(b.vips[1], 80))
	b.mustReachBoth(t, scene.At(b.service.Spec.ClusterIPs[0], 80))
	clients := []*scene.Client{b.Pod, b.Node, b.Outside}
	scene.MustAllFail(t, scene.Rejected, scene.Dials(clients, "tcp", scene.At(b.Lab.Nodes[0].IPv4.String(), 80))...) // by the node
}

// ingress is what the cloud controller writes about a Service.
func ingress(ips ...string) []corev1.LoadBalancerIngress {
	var all []corev1.LoadBalancerIngress
	for _, ip := range ips {
		all = append(all, corev1.LoadBalancerIngress{IP: ip})
	}

	return all
}
