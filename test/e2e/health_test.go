package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// changeNode changes the Node object of a node.
func (s *testbed) changeNode(t testing.TB, node *lab.Node, change func(*corev1.Node)) {
	t.Helper()
	nodes := s.Client.CoreV1().Nodes()
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		object, err := nodes.Get(t.Context(), s.NodeName(node), metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(object)
		_, err = nodes.Update(t.Context(), object, metav1.UpdateOptions{})

		return err
	})
	lab.Must(t, err)
}

func (s *testbed) deleteNode(t testing.TB, node *lab.Node) {
	t.Helper()
	lab.Must(t, s.Client.CoreV1().Nodes().Delete(t.Context(), s.NodeName(node), metav1.DeleteOptions{}))
}

// Load balancers drain a node that is about to be deleted, or is deleted (/healthz),
// while its proxy goes on (/livez, /readyz).
//
//	node-1 192.168.50.1:10256, [fd00:50::1]:10256
func TestHealthz(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	sluice.MustRestart(t, s.Agent, "--healthz-bind-address=0.0.0.0:10256")
	outside := in(s.Lab.Nodes[1].Namespace)
	addresses := []string{scene.At(self.IPv4.String(), 10256), scene.At(self.IPv6.String(), 10256)}
	const both = `"status":{"IPv4":{`
	mustServe := func(healthz int, eligible string) {
		t.Helper()
		for _, address := range addresses {
			mustAnswer(t, outside, address, "/healthz", healthz, `"nodeEligible":`+eligible, `"healthy":true`, both, `"IPv6":{`)
			got := mustAnswer(t, outside, address, "/livez", 200, `"healthy":true`, both)
			if strings.Contains(got.body, "nodeEligible") {
				t.Errorf("/livez is about the node: %s", got.body)
			}
			mustAnswer(t, outside, address, "/readyz", 200, `{"ready":true}`)
		}
	}
	mustServe(200, "true")
	got := mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/healthz", 200)
	if got.header.Get("Content-Type") != "application/json" || got.header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("headers are %v", got.header)
	}
	mustAnswer(t, of(s.Pod), addresses[0], "/metrics", 404)

	s.changeNode(t, self, func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Value: "1", Effect: corev1.TaintEffectNoSchedule}}
	})
	mustServe(503, "false")
	s.changeNode(t, self, func(n *corev1.Node) { n.Spec.Taints = nil })
	mustServe(200, "true")
	s.deleteNode(t, self)
	mustServe(503, "false")
	s.CreateNode(t, self)
	mustServe(200, "true")
}

// A proxy whose API server does not answer is starting: alive, but not ready.
func TestHealthzWithoutAPIServer(t *testing.T) {
	s := mustTestbed(t)
	s.Tunnel.Cut()
	lab.Must(t, s.Agent.Stop())
	s.Agent.SetArgs("--healthz-bind-address=127.0.0.1:10256")
	lab.Must(t, s.Agent.Start())
	node := of(s.Node)
	const address = "127.0.0.1:10256"
	lab.EventuallyIn(t, time.Minute, "the agent answers", func() bool {
		_, err := node(address, "/livez")

		return err == nil
	})
	mustAnswer(t, node, address, "/livez", 200, `"healthy":true`)
	mustAnswer(t, node, address, "/healthz", 503, `"healthy":true`, `"nodeEligible":false`)
	mustAnswer(t, node, address, "/readyz", 503, `"ready":false`, "not all Services")
	s.Tunnel.Mend(t)
	sluice.MustWait(t, s.Agent)
	mustAnswer(t, node, address, "/readyz", 200)
	mustAnswer(t, node, address, "/healthz", 200)
}

// balancer makes a Service a load balancer with externalTrafficPolicy Local.
func balancer(svc *corev1.Service) {
	svc.Spec.Type = corev1.ServiceTypeLoadBalancer
	svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
}

// Load balancers find out which nodes have endpoints while pods come and go.
//
//	web, health check at node-1:port ─┬─ pod-1-0, pod-1-1
//	                                  └─ pod-2-0
func TestHealthCheckNodePort(t *testing.T) {
	s := mustTestbed(t)
	self, one, two, far := s.Lab.Nodes[0], s.Local()[0], s.Local()[1], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(one, two, far)...)
	web := s.CreateService(t, "web", balancer)
	v4, v6 := scene.At(self.IPv4.String(), web.Spec.HealthCheckNodePort), scene.At(self.IPv6.String(), web.Spec.HealthCheckNodePort)
	nodePort := scene.At(self.IPv4.String(), web.Spec.Ports[0].NodePort)
	askers := []asker{of(s.Node), of(s.Pod), in(s.Lab.Nodes[1].Namespace)}
	mustCount := func(code int, count string, addresses ...string) {
		t.Helper()
		for _, ask := range askers {
			for _, address := range addresses {
				got := mustAnswer(t, ask, address, "/", code, `"localEndpoints": `+count+",")
				want := "{\n\t\"service\": {\n\t\t\"namespace\": \"" + s.Namespace + "\",\n\t\t\"name\": \"web\"\n\t},\n" +
					"\t\"localEndpoints\": " + count + ",\n\t\"serviceProxyHealthy\": true\n}"
				if got.body != want || got.header.Get("X-Load-Balancing-Endpoint-Weight") != count {
					t.Errorf("%s: weight %q and\n%s\nwant\n%s", address, got.header.Get("X-Load-Balancing-Endpoint-Weight"), got.body, want)
				}
			}
		}
	}
	mustCount(200, "2", v4, v6)
	s.SetEndpoints(t, "web", scene.Endpoint{Pod: one, Is: scene.Ready}, scene.Endpoint{Pod: two, Is: scene.Draining}, scene.Endpoint{Pod: far, Is: scene.Ready})
	mustCount(200, "1", v4, v6)
	s.SetEndpoints(t, "web", scene.Endpoint{Pod: one, Is: scene.Draining}, scene.Endpoint{Pod: two, Is: scene.Draining}, scene.Endpoint{Pod: far, Is: scene.Ready})
	mustCount(503, "0", v4, v6)
	scene.MustReach(t, s.Node.To("tcp", nodePort), far.Name) // Services work all the time
	s.SetEndpoints(t, "web", scene.Endpoint{Pod: one, Is: scene.Starting}, scene.Endpoint{Pod: two, Is: scene.Ready})
	mustCount(200, "1", v4, v6)
	s.DeleteSlice(t, "web-v6")
	mustCount(503, "0", v6)
	mustCount(200, "1", v4)
	s.SetEndpoints(t, "web", scene.ReadyAll(one, two)...)
	mustCount(200, "2", v4, v6)

	// The taint is about new connections to any Service, and not about this.
	s.changeNode(t, self, func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule}}
	})
	mustCount(200, "2", v4, v6)

	s.ChangeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		svc.Spec.HealthCheckNodePort = 0
	})
	mustNotAnswer(t, askers[2], v4)
	mustNotAnswer(t, askers[2], v6)
	web = s.ChangeService(t, "web", func(svc *corev1.Service) {
		svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	})
	v4, v6 = scene.At(self.IPv4.String(), web.Spec.HealthCheckNodePort), scene.At(self.IPv6.String(), web.Spec.HealthCheckNodePort)
	mustCount(200, "2", v4, v6)
	s.DeleteService(t, "web")
	mustNotAnswer(t, askers[2], v4)
	mustNotAnswer(t, askers[2], v6)
}

// Health check node ports answer on the addresses of node ports, also on one that
// comes later; kube-proxy looks for them only when it starts.
//
//	node-1 192.168.50.1, and 10.77.0.1 later ── web
func TestHealthCheckAddresses(t *testing.T) {
	s := mustTestbed(t)
	self := s.Lab.Nodes[0]
	sluice.MustRestartUnmet(t, s.Agent, "--nodeport-addresses=10.77.0.0/16,fd00:50::/64")
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()...)...)
	port := s.CreateService(t, "web", balancer).Spec.HealthCheckNodePort
	node := of(s.Node)
	mustAnswer(t, node, scene.At(self.IPv6.String(), port), "/", 200)
	later := netip.MustParsePrefix("10.77.0.1/32")
	mustNotAnswer(t, node, scene.At(self.IPv4.String(), port))
	for range 2 {
		lab.Must(t, self.Namespace.AddAddress("lo", later))
		mustAnswer(t, node, scene.At("10.77.0.1", port), "/", 200)
		if !listens(t, s.Agent, later.Addr(), port) {
			t.Fatal("it answers, but no process listens")
		}
		lab.Must(t, self.Namespace.RemoveAddress("lo", later))
		lab.Eventually(t, "the agent does not listen on an address that is gone", func() bool { return !listens(t, s.Agent, later.Addr(), port) })
	}
	mustNotAnswer(t, node, scene.At(self.IPv4.String(), port))
	mustNotAnswer(t, node, scene.At("127.0.0.1", port))
}

// listens reports whether a process on the agent's node listens at a port of an
// address, which the node need not have.
func listens(t testing.TB, agent *sluice.Node, addr netip.Addr, port int32) bool {
	t.Helper()
	sockets, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", agent.PID()))
	lab.Must(t, err)
	ip := addr.As4() // printed as a number of this machine's byte order
	slices.Reverse(ip[:])
	const listening = "00000000:0000 0A"

	return strings.Contains(string(sockets), fmt.Sprintf(" %X:%04X %s", ip[:], port, listening))
}
