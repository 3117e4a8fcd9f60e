package e2e

import (
	"net/netip"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// scene is two nodes of a cluster, of which the first has an agent, and pods
// that answer. Clients are on the first node and in its first pod.
//
//	API server ┄ tunnel ┄ node-1 192.168.50.1 ─┬─ pod-1-0 10.244.1.2  client
//	                      client, agent        ├─ pod-1-1 10.244.1.3:8080
//	                                           └─ pod-1-2 10.244.1.4:8080
//	                      node-2 192.168.50.2 ─┬─ pod-2-0 10.244.2.2:8080
//	                                           ├─ pod-2-1 10.244.2.3:8080
//	                                           └─ pod-2-2 10.244.2.4:8080
//
// IPv6: fd00:50::1, fd00:10:244:1::2 and so on. To the API server, the nodes
// are called after the test.
type scene struct {
	*api
	tunnel *cluster.Tunnel
	lab    *lab.Cluster
	cgroup *lab.Cgroup
	agent  *sluice.Node

	node *lab.Caller // a client on node-1, outside of pods
	pod  *lab.Caller // one in pod-1-0

	servers map[string]*lab.Server // by pod
}

const serverPort = 8080

// mustCluster returns the API server that all tests share.
func mustCluster(t testing.TB) *cluster.Cluster {
	t.Helper()

	return cluster.Shared(t)
}

// mustScene sets a scene, with an agent to which all is well.
func mustScene(t testing.TB) *scene {
	t.Helper()
	s := &scene{
		lab:     lab.MustNew(t, lab.Config{Nodes: 2, PodsPerNode: 3}),
		cgroup:  lab.MustCgroup(t, "e2e"),
		servers: make(map[string]*lab.Server),
	}
	shared := mustCluster(t)
	cfg := shared.Config()
	cfg.WarningHandler = rest.NoWarnings{} // externalIPs are deprecated
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.api = mustAPI(t, client, s.lab.Nodes)
	for _, pod := range s.lab.Pods()[1:] {
		s.serve(t, pod)
	}
	self := s.lab.Nodes[0]
	s.tunnel = shared.MustTunnel(t, self.Namespace)
	s.agent = sluice.MustNode(t, sluice.Config{
		Namespace:  self.Namespace,
		Cgroup:     s.cgroup,
		NodeName:   s.nodeName(self),
		Kubeconfig: shared.Kubeconfig(),
	})
	s.node = s.caller(t, self.Namespace)
	s.pod = s.caller(t, self.Pods[0].Namespace)

	return s
}

// serve has a pod answer on both its addresses.
func (s *scene) serve(t testing.TB, pod *lab.Pod) {
	t.Helper()
	s.servers[pod.Name] = lab.MustServe(t, pod.Namespace, pod.Name, pod.At(serverPort)...)
}

// caller starts another client.
func (s *scene) caller(t testing.TB, where *lab.Namespace) *lab.Caller {
	t.Helper()

	return lab.MustCaller(t, where, s.cgroup)
}

// anotherPod starts a pod that answers.
func (s *scene) anotherPod(t testing.TB, node *lab.Node) *lab.Pod {
	t.Helper()
	pod, err := node.AddPod()
	if err != nil {
		t.Fatal(err)
	}
	s.serve(t, pod)

	return pod
}

// pods are those that answer; local and remote are those of node-1 and node-2.
func (s *scene) pods() []*lab.Pod   { return s.lab.Pods()[1:] }
func (s *scene) local() []*lab.Pod  { return s.lab.Nodes[0].Pods[1:] }
func (s *scene) remote() []*lab.Pod { return s.lab.Nodes[1].Pods }

// at is an address with a port, as clients dial it.
func at(address string, port int32) string {
	return netip.AddrPortFrom(netip.MustParseAddr(address), uint16(port)).String()
}

// names are those of pods.
func names(pods ...*lab.Pod) []string {
	var all []string
	for _, pod := range pods {
		all = append(all, pod.Name)
	}

	return all
}
