package flows

import (
	"maps"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The API servers' address is that of a load balancer outside, which a Service has as well: it leads to the API servers, so
// it may. All of its endpoints are dead when an agent starts that finds it programmed. What processes dial leads there; the
// agent reaches the API server nevertheless, and has all Services.
//
//	node-1, in its cgroup: the agent, curl ── 192.168.50.2:6443 ─┬─ by the Service: pod-1-0:6443, where nothing listens
//	                                                             └─ by the network: node-2, the API server
func TestAgentReachesTheAPIServer(t *testing.T) {
	const port = 6443
	nodes := lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 1}).Nodes
	self, balancer, dead := nodes[0], nodes[1].IPv4, nodes[0].Pods[0].IPv4

	http := corev1.ServicePort{Name: "https", Protocol: corev1.ProtocolTCP, Port: port}
	front := object.Service("kube-system", "front", []string{"10.96.0.9"}, http)
	front.Spec.Type = corev1.ServiceTypeLoadBalancer
	front.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: balancer.String()}}
	resources := map[string][]runtime.Object{
		"nodes":        {object.Node(self.Name, self.IPv4)},
		"servicecidrs": {},
		"services":     {object.Service("default", "kubernetes", []string{"10.96.0.1"}, http), front},
	}
	for namespace, name := range map[string]string{"default": "kubernetes", "kube-system": "front"} {
		slice := object.Slice(namespace, name, name, discoveryv1.AddressTypeIPv4, object.EndpointPort("https", corev1.ProtocolTCP, port))
		slice.Endpoints = []discoveryv1.Endpoint{object.Endpoint(dead, self.Name)}
		resources["endpointslices"] = append(resources["endpointslices"], slice)
	}
	at := netip.AddrPortFrom(balancer, port).String()
	cgroup := lab.MustCgroup(t, "flows")
	node, err := sluice.NewNode(sluice.Config{
		Binary: sluice.MustBinary(t), Namespace: self.Namespace, Cgroup: cgroup, NodeName: self.Name,
		Kubeconfig: mustServeObjects(t, nodes[1].Namespace, at, (*httptest.Server).Start, resources),
	})
	lab.Must(t, err)
	t.Cleanup(func() {
		lab.Must(t, node.Close())
		if t.Failed() {
			lab.KeepLog(t, "agent", node.Log())
		}
	})
	node.SetArgs("--cgroup-root", node.AgentCgroup().Path()) // the agent's own sockets are translated, as on a node
	lab.Must(t, node.Start())
	sluice.MustWait(t, node)
	other := lab.MustCaller(t, self.Namespace, node.AgentCgroup())
	dial := func() error {
		socket, err := other.Socket("tcp4")
		lab.Must(t, err)
		defer socket.Close()

		return socket.Connect(at)
	}
	if err := dial(); err == nil {
		t.Error("the Service of which all endpoints are dead is not in force")
	}

	for _, end := range []func() error{node.Stop, node.Kill} {
		lab.Must(t, end(), node.Start())
		lab.EventuallyIn(t, 20*time.Second, "the agent has all Services", func() bool {
			state, err := node.Status()

			return err == nil && state.Running && state.Synced
		})
		if err := dial(); err == nil {
			t.Error("the Service is not in force any more")
		}
	}
}

// An earlier agent, to which the API server was at another port, has programmed a tenant's Service that names the address and port
// at which it is now. While no agent runs, the Service is deleted. The tenant's pod accepts what the next agent dials first, and
// answers what is no TLS, or nothing. The agent reaches the API server nevertheless, and takes the Service away.
//
//	node-1, in its cgroup: the agent, curl ── node-2:6443 ─┬─ by the old maps: pod-1-0:6443, the tenant's
//	                                                       └─ by the network: the API server
func TestAgentLeavesTenantsPod(t *testing.T) {
	const port = 6443
	for _, test := range []struct {
		name   string
		isIPv6 bool
		serve  func(*testing.T, *lab.Namespace, string)
	}{
		{"that answers, IPv4", false, func(t *testing.T, pod *lab.Namespace, at string) { lab.MustServe(t, pod, "tenant", at) }},
		{"that is silent, IPv6", true, func(t *testing.T, pod *lab.Namespace, at string) {
			listener, err := pod.Listen("tcp", at) // the kernel accepts
			lab.Must(t, err)
			t.Cleanup(func() { _ = listener.Close() })
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodes := lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 1}).Nodes
			self, server, tenant := nodes[0], nodes[1].IPv4, nodes[0].Pods[0].IPv4
			network, clusterIP, family := "tcp4", "10.96.0.9", discoveryv1.AddressTypeIPv4
			if test.isIPv6 {
				server, tenant = nodes[1].IPv6, nodes[0].Pods[0].IPv6
				network, clusterIP, family = "tcp6", "fd00:96::9", discoveryv1.AddressTypeIPv6
			}
			before, now := netip.AddrPortFrom(server, port+1).String(), netip.AddrPortFrom(server, port).String()
			test.serve(t, self.Pods[0].Namespace, netip.AddrPortFrom(tenant, port).String())

			svc := object.Service("tenant", "web", []string{clusterIP}, corev1.ServicePort{Name: "https", Protocol: corev1.ProtocolTCP, Port: port})
			svc.Spec.ExternalIPs = []string{server.String()}
			slice := object.Slice("tenant", "web", "web", family, object.EndpointPort("https", corev1.ProtocolTCP, port))
			slice.Endpoints = []discoveryv1.Endpoint{object.Endpoint(tenant, self.Name)}
			without := map[string][]runtime.Object{
				"nodes": {object.Node(self.Name, self.IPv4, self.IPv6)}, "servicecidrs": {}, "services": {}, "endpointslices": {},
			}
			with := maps.Clone(without)
			with["services"], with["endpointslices"] = []runtime.Object{svc}, []runtime.Object{slice}
			cgroup := lab.MustCgroup(t, "flows")
			node, err := sluice.NewNode(sluice.Config{
				Binary: sluice.MustBinary(t), Namespace: self.Namespace, Cgroup: cgroup, NodeName: self.Name,
				Kubeconfig: mustServeObjects(t, nodes[1].Namespace, before, (*httptest.Server).StartTLS, with),
			})
			lab.Must(t, err)
			t.Cleanup(func() {
				lab.Must(t, node.Close())
				if t.Failed() {
					lab.KeepLog(t, "agent", node.Log())
				}
			})
			args := []string{"--cgroup-root", node.AgentCgroup().Path()} // the agent's own sockets are translated, as on a node
			node.SetArgs(args...)
			lab.Must(t, node.Start())
			sluice.MustWait(t, node)
			lab.Must(t, node.Stop())

			kubeconfig := mustServeObjects(t, nodes[1].Namespace, now, (*httptest.Server).StartTLS, without)
			other := lab.MustCaller(t, self.Namespace, node.AgentCgroup())
			isTheAPIServer := func() bool {
				socket, err := other.Socket(network)
				lab.Must(t, err)
				defer socket.Close()
				lab.Must(t, socket.Connect(now), socket.Send("GET / HTTP/1.0\r\n\r\n"))
				text, _, err := socket.Recv()

				return err == nil && strings.Contains(text, "HTTPS server")
			}
			if isTheAPIServer() {
				t.Fatal("the tenant's Service is not in force")
			}
			node.SetArgs(append(args, "--kubeconfig", kubeconfig)...)
			lab.Must(t, node.Start())
			lab.EventuallyIn(t, 40*time.Second, "the agent has all Services", func() bool {
				state, err := node.Status()

				return err == nil && state.Running && state.Synced
			})
			lab.Eventually(t, "the tenant's Service is gone", isTheAPIServer)
		})
	}
}
