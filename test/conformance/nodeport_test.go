package conformance

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// dialHost dials from a process of the node whose sockets are not translated.
const dialHost = "host"

// nodePorts is a node with two addresses of each family, at both of which a
// process listens on the number of a node port. Its answers show where node
// ports do.
//
//	outside ─┬─ 192.168.50.1:n ─┬─ web:n ─┬─ pod-1-0
//	         └─ 192.168.51.1:n ─┤         └─ pod-2-0
//	                            └─ the process
type nodePorts struct {
	*scene.Scene
	port         int32
	pods         []string
	first, other [2]netip.Addr // of the node, on each segment
}

func mustNodePorts(t *testing.T, cfg scene.Config) *nodePorts {
	t.Helper()
	cfg.Lab.SecondUplink = true
	s := scene.MustSet(t, cfg)
	self := s.Lab.Nodes[0]
	n := &nodePorts{
		Scene: s,
		first: [2]netip.Addr{self.IPv4, self.IPv6},
		other: [2]netip.Addr{self.SecondIPv4, self.SecondIPv6},
		pods:  scene.Names(s.Local()[0], s.Remote()[0]),
	}
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	n.port = s.CreateService(t, "web", scene.NodePort).Spec.Ports[0].NodePort
	lab.MustServe(t, self.Namespace, dialHost, "tcp/"+scene.At("::", n.port))

	return n
}

// mustAnswer waits until these pods answer all clients of an address of the node.
func (n *nodePorts) mustAnswer(t *testing.T, address netip.Addr, who ...string) {
	t.Helper()
	for _, from := range []*scene.Client{n.Pod, n.Node, n.anywhere()} {
		scene.MustReach(t, from.To("tcp", scene.At(address.String(), n.port)), who...)
	}
}

// anywhere is the client outside, which has a second address for the second
// segment.
func (n *nodePorts) anywhere() *scene.Client {
	from := *n.Outside
	from.IPv4, from.IPv6 = netip.Addr{}, netip.Addr{}

	return &from
}

// The configuration decides which addresses of the node answer: the node's
// own by default, those of a list, or all of them. The same holds for addresses that
// the node gets later.
func TestNodePortAddresses(t *testing.T) {
	t.Parallel()
	n := mustNodePorts(t, scene.Config{})
	for f := range n.first {
		n.mustAnswer(t, n.first[f], n.pods...) // and not the process
		n.mustAnswer(t, n.other[f], dialHost)
	}

	sluice.MustRestart(t, n.Agent, "--nodeport-addresses", "192.168.51.0/24,fd00:51::/64")
	for f := range n.first {
		n.mustAnswer(t, n.first[f], dialHost)
		n.mustAnswer(t, n.other[f], n.pods...)
	}
	later := netip.MustParsePrefix("192.168.51.77/24")
	lab.Must(t, n.Lab.Nodes[0].AddAddress("eth1", later))
	n.mustAnswer(t, later.Addr(), n.pods...)

	// Without endpoints, the process is out of reach there, and only there.
	n.SetEndpoints(t, "web")
	scene.MustFail(t, n.anywhere().To("tcp", scene.At(n.other[0].String(), n.port)), scene.Rejected)
	scene.MustFail(t, n.Node.To("tcp", scene.At(n.other[1].String(), n.port)), scene.Rejected)
	n.mustAnswer(t, n.first[0], dialHost)
	n.SetEndpoints(t, "web", scene.ReadyAll(n.Local()[0], n.Remote()[0])...)
	n.mustAnswer(t, n.other[0], n.pods...)

	sluice.MustRestart(t, n.Agent, "--nodeport-addresses", "192.168.51.0/24") // no range of IPv6: all of it
	n.mustAnswer(t, n.first[0], dialHost)
	n.mustAnswer(t, n.other[0], n.pods...)
	n.mustAnswer(t, n.first[1], n.pods...)
	n.mustAnswer(t, n.other[1], n.pods...)
}

// With all addresses chosen, a load balancer's address that the node has, on a device or by a route, is one
// of them, and loopback is none to clients that are not on the node.
func TestNodePortsEverywhere(t *testing.T) {
	t.Parallel()
	n := mustNodePorts(t, scene.Config{Args: []string{"--nodeport-addresses", "0.0.0.0/0,::/0"}})
	for f := range n.first {
		n.mustAnswer(t, n.first[f], n.pods...)
		n.mustAnswer(t, n.other[f], n.pods...)
	}
	vip, _ := scene.VirtualIPs()
	n.ChangeService(t, "web", scene.LoadBalancer)
	n.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: vip})
	number := scene.At(vip, n.port)
	for _, has := range []string{"address add %s/32 dev lo", "route add local %s dev eth0 proto 66"} { // as Google's cloud has it
		scene.MustFail(t, n.Pod.To("tcp", number), scene.Untouched)
		has = fmt.Sprintf(has, vip)
		mustIP(t, n.Lab.Nodes[0].Namespace, has)
		for _, from := range []*scene.Client{n.Pod, n.Node, n.Outside} {
			scene.MustReach(t, from.To("tcp", number), n.pods...)
		}
		mustIP(t, n.Lab.Nodes[0].Namespace, strings.Replace(has, " add ", " del ", 1))
	}
	scene.MustFail(t, n.Pod.To("tcp", scene.At("127.0.0.1", n.port)), scene.Rejected) // by itself
	scene.MustReach(t, n.Node.To("tcp", scene.At("127.0.0.1", n.port)), n.pods...)    // listed difference 3
}

func mustIP(t testing.TB, ns *lab.Namespace, command string) {
	t.Helper()
	_, err := lab.Output(ns, nil, "ip", strings.Fields(command)...)
	lab.Must(t, err)
}

// A Node without addresses in its status answers on all that it has, after a while;
// one that has an IPv4 address only answers on all of IPv6.
func TestNodePortsWithoutNodeIPs(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name      string
		addresses []netip.Addr
		first     string
	}{
		{"none", []netip.Addr{}, ""},
		{"IPv4 only", []netip.Addr{netip.MustParseAddr("192.168.50.1")}, dialHost},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := mustNodePorts(t, scene.Config{NodeAddresses: test.addresses})
			for f := range n.first {
				n.mustAnswer(t, n.first[f], n.pods...)
			}
			n.mustAnswer(t, n.other[1], n.pods...)
			if test.first == "" {
				n.mustAnswer(t, n.other[0], n.pods...)
			} else {
				n.mustAnswer(t, n.other[0], test.first)
			}
		})
	}
}

// A list of addresses says whether processes of the node reach node ports on its loopback addresses,
// those of each family, which is beside what it says of the node's other addresses.
func TestLocalhostNodePortsOfAList(t *testing.T) {
	t.Parallel()
	n := mustNodePorts(t, scene.Config{Args: []string{"--nodeport-addresses", "primary"}})
	for _, test := range []struct {
		list   string
		v4, v6 bool
		other  bool // the other addresses of the node answer
	}{
		{"primary", false, false, false},
		{"primary,localhost", true, true, false},
		{"primary,127.0.0.1/32,fd00:51::/64", true, false, false},
		{"localhost,192.168.51.0/24,primary", true, true, true},
		{"192.168.50.0/24,fd00:50::/64", false, false, false},
		{"all", true, true, true},
	} {
		sluice.MustRestart(t, n.Agent, "--nodeport-addresses", test.list)
		n.mustAnswer(t, n.first[0], n.pods...)
		n.mustAnswer(t, n.first[1], n.pods...)
		other := []string{dialHost}
		if test.other {
			other = n.pods
		}
		n.mustAnswer(t, n.other[0], other...)
		for ip, answers := range map[string]bool{"127.0.0.1": test.v4, "::1": test.v6} {
			address := scene.At(ip, n.port)
			if answers {
				scene.MustReach(t, n.Node.To("tcp", address), n.pods...)
			} else {
				scene.MustReach(t, n.Node.To("tcp", address), dialHost)
			}
			scene.MustFail(t, n.Pod.To("tcp", address), scene.Rejected) // by the pod itself
		}
	}
}

// Processes of the node reach node ports on its loopback addresses (listed
// difference 3); in a pod these addresses are the pod's own.
func TestLocalhostNodePorts(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(here, there)...)
	web := s.CreateService(t, "web", scene.NodePort)
	for _, ip := range []string{"127.0.0.1", "::1"} {
		for i, network := range []string{"tcp", "udp"} {
			address := scene.At(ip, web.Spec.Ports[i].NodePort)
			scene.MustReach(t, s.Node.To(network, address), here.Name, there.Name)
			scene.MustFail(t, s.Pod.To(network, address), scene.Rejected) // by the pod itself
		}
	}
}

// A node port without endpoints is refused; one that may not leave the node is
// dropped for clients outside, and open to clients of the cluster.
//
//	clients ──── node-1:n ─┬─ pod-1-0, not ready
//	                       └─ pod-2-0
func TestNodePortWithoutEndpoints(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	web := s.CreateService(t, "web", scene.NodePort)
	for _, ip := range []netip.Addr{s.Lab.Nodes[0].IPv4, s.Lab.Nodes[0].IPv6} {
		address := scene.At(ip.String(), web.Spec.Ports[0].NodePort)
		s.SetEndpoints(t, "web", scene.Endpoint{Pod: here, Is: scene.Starting})
		scene.MustAllFail(t, scene.Rejected, scene.Dials(s.Clients(), "tcp", address)...)
		s.SetEndpoints(t, "web", scene.Endpoint{Pod: here, Is: scene.Starting}, scene.Endpoint{Pod: there, Is: scene.Ready})
		s.ChangeService(t, "web", scene.ExternalLocal)
		for _, c := range []*scene.Client{s.Pod, s.Guest, s.Node} {
			scene.MustReach(t, c.To("tcp", address), there.Name)
		}
		scene.MustFail(t, s.Outside.To("tcp", address), scene.Dropped)
		s.ChangeService(t, "web", scene.ExternalCluster)
		scene.MustReach(t, s.Outside.To("tcp", address), there.Name)
	}
}

// A Service whose external IP is the node's own address has its port there,
// also where that is another Service's node port.
//
//	clients ──── node-1:n ─┬─ web, by its external IP ── pod-1-0
//	                       └─ late, by its node port ── pod-2-0
func TestNodePortPrecedence(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	here, there := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "late", scene.ReadyAll(there)...)
	s.SetEndpoints(t, "web", scene.ReadyAll(here)...)
	number := s.CreateService(t, "late", scene.NodePort).Spec.Ports[0].NodePort
	self := s.Lab.Nodes[0].IPv4.String()
	address := scene.At(self, number)
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", address), there.Name)
	}
	s.CreateService(t, "web", scene.ExternalIPs(self), func(svc *corev1.Service) { svc.Spec.Ports[0].Port = number })
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", address), here.Name)
	}
	s.DeleteService(t, "web")
	for _, c := range s.Clients() {
		scene.MustReach(t, c.To("tcp", address), there.Name)
	}
}

// Traffic to another node's node port goes there untranslated.
//
//	clients on node-1 ─── node-2:n ── a process of node-2, and not web:n
func TestOtherNodesNodePort(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0])...)
	number := s.CreateService(t, "web", scene.NodePort).Spec.Ports[0].NodePort
	other := s.Lab.Nodes[1]
	lab.MustServe(t, other.Namespace, dialHost, other.At(uint16(number))...)
	scene.MustReach(t, s.Pod.To("tcp", scene.At(s.Lab.Nodes[0].IPv4.String(), number)), s.Local()[0].Name)
	for _, c := range []*scene.Client{s.Pod, s.Guest, s.Node} {
		for _, ip := range []netip.Addr{other.IPv4, other.IPv6} {
			d := c.To("tcp", scene.At(ip.String(), number))
			scene.MustReach(t, d, dialHost)
			want := c.IPv4
			if ip.Is6() {
				want = c.IPv6
			}
			if got := d.MustAsk(t).Client.Addr(); c != s.Node && got != want {
				t.Errorf("%s: node-2 saw %s, want %s", d, got, want)
			}
		}
	}
}
