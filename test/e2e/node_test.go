package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// setNode replaces a Node object, which is called after the test.
func (s *testbed) setNode(t testing.TB, node *lab.Node, podCIDR string, addresses ...string) {
	t.Helper()
	created := object.Node(s.NodeName(node), addresses...)
	if podCIDR != "" {
		created.Spec.PodCIDR, created.Spec.PodCIDRs = podCIDR, []string{podCIDR}
	}
	s.deleteNode(t, node)
	if _, err := s.Client.CoreV1().Nodes().Create(t.Context(), created, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// setNodeAddresses is what a kubelet writes.
func (s *testbed) setNodeAddresses(t testing.TB, node *lab.Node, addresses ...string) {
	t.Helper()
	nodes := s.Client.CoreV1().Nodes()
	changed, err := nodes.Get(t.Context(), s.NodeName(node), metav1.GetOptions{})
	lab.Must(t, err)
	changed.Status.Addresses = object.InternalIPs(addresses...)
	if _, err := nodes.UpdateStatus(t.Context(), changed, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// nodePortScene is a scene with a Service on a node port, and two more addresses
// of node-1.
type nodePortScene struct {
	*testbed
	self    *lab.Node
	web     *corev1.Service
	backend string // the name of its pod
}

const secondIPv4, secondIPv6 = "10.77.0.1", "fd00:77::1"

func mustNodePortScene(t testing.TB) *nodePortScene {
	s := &nodePortScene{testbed: mustTestbed(t)}
	s.self, s.backend = s.Lab.Nodes[0], s.Local()[0].Name
	for _, address := range []string{secondIPv4, secondIPv6} {
		addr := netip.MustParseAddr(address)
		lab.Must(t, s.self.Namespace.AddAddress("lo", netip.PrefixFrom(addr, addr.BitLen())))
	}
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0])...)
	s.web = s.CreateService(t, "web", balancer)

	return s
}

// mustServe waits until node ports answer where they should and nowhere else,
// and health check node ports, too.
func (s *nodePortScene) mustServe(t testing.TB, want ...string) {
	t.Helper()
	for _, address := range []string{s.self.IPv4.String(), secondIPv4, s.self.IPv6.String(), secondIPv6} {
		nodePort := s.Node.To("tcp", scene.At(address, s.web.Spec.Ports[0].NodePort))
		check := scene.At(address, s.web.Spec.HealthCheckNodePort)
		if strings.Contains(" "+strings.Join(want, " ")+" ", " "+address+" ") {
			scene.MustReach(t, nodePort, s.backend)
			mustAnswer(t, of(s.Node), check, "/", 200)
		} else {
			scene.MustFail(t, nodePort, scene.Rejected) // by the node: no process listens
			mustNotAnswer(t, of(s.Node), check)
		}
	}
}

// "Primary" follows the Node's addresses: those that it gets, loses for a moment,
// and has when it comes back. The agent keeps running.
//
//	node-1 192.168.50.1, 10.77.0.1, fd00:50::1, fd00:77::1 ── web ── pod-1-0
func TestNodeAddresses(t *testing.T) {
	s := mustNodePortScene(t)
	first4, first6 := s.self.IPv4.String(), s.self.IPv6.String()
	pid := s.Agent.PID()
	s.mustServe(t, first4, first6)
	s.setNodeAddresses(t, s.self, secondIPv6, secondIPv4)
	s.mustServe(t, secondIPv4, secondIPv6)
	s.setNodeAddresses(t, s.self) // the kubelet has lost them
	s.setNodeAddresses(t, s.self, first4)
	s.mustServe(t, first4, secondIPv6)
	s.deleteNode(t, s.self)
	s.mustServe(t, first4, secondIPv6)
	s.CreateNode(t, s.self)
	s.mustServe(t, first4, first6)
	if s.Agent.PID() != pid || strings.Count(s.Agent.Log(), "msg=synced") != 1 {
		t.Error("it is another agent")
	}

	// A Node of one family leaves the other open: all its addresses answer.
	s.setNode(t, s.self, "", first4)
	sluice.MustRestart(t, s.Agent)
	s.mustServe(t, first4, first6, secondIPv6)
	// Of no Node, nothing is known at all; until there is one.
	s.deleteNode(t, s.self)
	sluice.MustRestartUnmet(t, s.Agent)
	s.mustServe(t, first4, secondIPv4, first6, secondIPv6)
	s.CreateNode(t, s.self)
	s.mustServe(t, first4, first6)
}

// --bind-address takes the place of the Node's address of its family, whatever
// the Node has later, and source ranges are checked against it for the node's own
// traffic.
func TestBindAddress(t *testing.T) {
	s := mustNodePortScene(t)
	first6 := s.self.IPv6.String()
	sluice.MustRestart(t, s.Agent, "--bind-address="+secondIPv4, "--healthz-bind-address=127.0.0.1:10256")
	s.mustServe(t, secondIPv4, first6)
	s.setNodeAddresses(t, s.self, s.self.IPv4.String(), secondIPv6)
	s.mustServe(t, secondIPv4, secondIPv6)

	s.SetLoadBalancer(t, "web", corev1.LoadBalancerIngress{IP: "203.0.113.7"})
	vip := s.Node.To("tcp", "203.0.113.7:80")
	scene.MustReach(t, vip, s.backend)
	ranges := func(ranges ...string) {
		s.ChangeService(t, "web", func(svc *corev1.Service) { svc.Spec.LoadBalancerSourceRanges = ranges })
	}
	ranges(s.self.IPv4.String() + "/32")
	scene.MustFail(t, vip, scene.Dropped)
	ranges(secondIPv4 + "/32")
	scene.MustReach(t, vip, s.backend)
}

// The node gets a zone, changes it and loses it, and so do the endpoints that are hinted for it.
//
//	web:80 ─┬─ pod-1-0  for zone a
//	        └─ pod-2-0  for zone b
func TestZoneToggled(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	a, b := s.Local()[0], s.Remote()[0]
	s.SetEndpoints(t, "web",
		scene.Endpoint{Pod: a, Is: scene.Ready, Zones: []string{"a"}},
		scene.Endpoint{Pod: b, Is: scene.Ready, Zones: []string{"b"}})
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	pid := s.Agent.PID()
	scene.MustReach(t, s.Pod.To("tcp", ip), a.Name, b.Name)
	for range 2 {
		s.LabelNode(t, self, corev1.LabelTopologyZone, "b")
		scene.MustReach(t, s.Pod.To("tcp", ip), b.Name)
		s.changeNode(t, self, func(n *corev1.Node) { n.Labels = nil })
		scene.MustReach(t, s.Pod.To("tcp", ip), a.Name, b.Name)
	}
	s.LabelNode(t, self, corev1.LabelTopologyZone, "a")
	scene.MustReach(t, s.Pod.To("tcp", ip), a.Name)
	if s.Agent.PID() != pid {
		t.Error("it is another agent")
	}
}

// With detectLocalMode NodeCIDR, the Node's podCIDRs define which clients are pods of this node:
// for those, externalTrafficPolicy Local does not bind. They change with the Node,
// and the agent goes on; kube-proxy exits.
//
//	pod-1-0 10.244.1.2 ── past the hooks ── 198.51.100.7:80 ── pod-2-0
func TestPodCIDRs(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	address := self.IPv4.String()
	s.setNode(t, self, "10.244.1.0/24", address)
	sluice.MustRestart(t, s.Agent, "--detect-local-mode=NodeCIDR")
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Remote()[0])...)
	s.CreateService(t, "web", balancer, withExternalIP("198.51.100.7"))
	pid := s.Agent.PID()
	connects := func() error {
		conn, err := self.Pods[0].Namespace.Dial("tcp", "198.51.100.7:80", 500*time.Millisecond)
		if err == nil {
			conn.Close()
		}

		return err
	}
	mustConnect := func(is string, want bool) {
		t.Helper()
		lab.Eventually(t, fmt.Sprintf("the pod is %s", is), func() bool { return (connects() == nil) == want })
	}
	mustConnect("one of the node's", true)
	s.setNode(t, self, "10.99.1.0/24", address)
	mustConnect("another client", false)
	s.setNode(t, self, "", address) // not allocated again yet: a pod stays one
	mustConnect("another client still", false)
	s.setNode(t, self, "10.244.1.0/24", address)
	mustConnect("one of the node's again", true)
	s.deleteNode(t, self)
	mustConnect("one of the node's still", true)
	s.CreateNode(t, self)
	if s.Agent.PID() != pid {
		t.Error("it is another agent")
	}
}

// On a node without IPv6 the agent serves IPv4, and health checks ignore
// IPv6.
func TestNodeWithoutIPv6(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	lab.Must(t, self.Namespace.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	sluice.MustRestart(t, s.Agent, "--healthz-bind-address=0.0.0.0:10256")
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0])...)
	web := s.CreateService(t, "web", balancer)
	scene.MustReach(t, s.Node.To("tcp", scene.At(web.Spec.ClusterIPs[0], 80)), s.Local()[0].Name)
	scene.MustReach(t, s.Node.To("tcp", scene.At(self.IPv4.String(), web.Spec.Ports[0].NodePort)), s.Local()[0].Name)
	mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), web.Spec.HealthCheckNodePort), "/", 200)
	got := mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), 10256), "/healthz", 200, `"IPv4":{`)
	if strings.Contains(got.body, "IPv6") {
		t.Errorf("IPv6 is checked: %s", got.body)
	}
	if status, err := s.Agent.Status(); err != nil || !status.Well() {
		t.Errorf("the agent is not well: %+v, %v", status, err)
	}
}
