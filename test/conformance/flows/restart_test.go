package flows

import (
	"net/netip"
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
		Kubeconfig: mustServeObjects(t, nodes[1].Namespace, at, resources),
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
