package scene

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Config is how a [Stage] differs from the default. The zero value is the one that
// tests share.
type Config struct {
	// Lab is how the lab is built. There are always two nodes and a client, and by
	// default four pods a node.
	Lab lab.Config
	// Args are further flags of the agent.
	Args []string
	// Kubeconfig is how the agent reaches the API server; "" is as cluster-admin.
	Kubeconfig string
	// NodeAddresses are those of the first Node object, as InternalIPs; nil is
	// both addresses of the node.
	NodeAddresses []netip.Addr
	// Unready leaves it to the test to wait for the agent.
	Unready bool
}

// Stage is a lab whose first node has an agent.
type Stage struct {
	Lab    *lab.Cluster
	Cgroup *lab.Cgroup // whose processes socket hooks see
	Agent  *sluice.Node
	Tunnel *cluster.Tunnel

	prefix string // of the names that the nodes have in the API server

	mu      sync.Mutex
	servers map[string]*lab.Server // by pod
	outside map[int]bool           // the numbers of outside clients in use
	next    int                    // the number of the next outside client
}

// virtual are the addresses that the client outside sends to node-1.
var virtual = []string{cluster.ServiceRangeIPv4, cluster.ServiceRangeIPv6, "203.0.113.0/24", "2001:db8:113::/64", "10.99.0.0/16"}

// mustStage builds a stage that ends with t.
func mustStage(t testing.TB, prefix string, cfg Config) *Stage {
	t.Helper()
	cfg.Lab.Nodes, cfg.Lab.Client = 2, true
	cfg.Lab.PodsPerNode = cmp.Or(cfg.Lab.PodsPerNode, 4)
	s := &Stage{
		Lab:     lab.MustNew(t, cfg.Lab),
		Cgroup:  lab.MustCgroup(t, "scene"),
		prefix:  prefix,
		servers: make(map[string]*lab.Server),
		outside: make(map[int]bool),
	}
	for _, pod := range s.Lab.Pods() {
		s.Serve(t, pod)
	}
	self := s.Lab.Nodes[0]
	// Otherwise node-1 would redirect it to the gateway for addresses that are no
	// Service's yet.
	for _, setting := range []string{"ipv4/conf/all", "ipv4/conf/eth0", "ipv6/conf/all", "ipv6/conf/eth0"} {
		lab.Must(t, s.Lab.Client.Sysctl("net/"+setting+"/accept_redirects", "0"))
	}
	for _, text := range virtual {
		to, via := netip.MustParsePrefix(text), self.IPv4
		if to.Addr().Is6() {
			via = self.IPv6
		}
		lab.Must(t, s.Lab.Client.AddRoute(to, via))
	}
	s.mustCreateNodes(t, cfg.NodeAddresses)
	s.Tunnel = cluster.Shared(t).MustTunnel(t, self.Namespace)
	agent := sluice.Config{
		Binary:     sluice.MustBinary(t),
		Namespace:  self.Namespace,
		Cgroup:     s.Cgroup,
		NodeName:   s.NodeName(self),
		Kubeconfig: cmp.Or(cfg.Kubeconfig, cluster.Shared(t).Kubeconfig()),
		// Many tests share an agent, and some open thousands of flows.
		Args: append([]string{"--flow-table-memory", "64Mi"}, cfg.Args...),
	}
	if !cfg.Unready {
		s.Agent = sluice.MustNode(t, agent)

		return s
	}
	var err error
	if s.Agent, err = sluice.NewNode(agent); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Agent.Close(); err != nil {
			t.Error(err)
		}
	})

	return s
}

// NodeName returns the name of a node of the lab in the API server.
func (s *Stage) NodeName(node *lab.Node) string { return s.prefix + "-" + node.Name }

// Local and Remote return the pods that answer: those of node-1 and those of node-2.
func (s *Stage) Local() []*lab.Pod  { return s.backends(0) }
func (s *Stage) Remote() []*lab.Pod { return s.backends(1) }

func (s *Stage) backends(node int) []*lab.Pod {
	s.mu.Lock()
	defer s.mu.Unlock()

	return slices.DeleteFunc(slices.Clone(s.Lab.Nodes[node].Pods), func(pod *lab.Pod) bool {
		return s.servers[pod.Name] == nil
	})
}

// Serve starts a server in a pod, on both its addresses.
func (s *Stage) Serve(t testing.TB, pod *lab.Pod) {
	t.Helper()
	server := lab.MustServe(t, pod.Namespace, pod.Name, pod.At(PodPort)...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.servers[pod.Name] = server
}

// addPod starts a pod that ends with the test.
func (s *Stage) addPod(t testing.TB, node *lab.Node) *lab.Pod {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	pod, err := node.AddPod()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := pod.Close(); err != nil {
			t.Error(err)
		}
	})

	return pod
}

// Stop ends the server of a pod, as if its process had died.
func (s *Stage) Stop(t testing.TB, pod *lab.Pod) {
	t.Helper()
	s.mu.Lock()
	server := s.servers[pod.Name]
	delete(s.servers, pod.Name)
	s.mu.Unlock()
	lab.Must(t, server.Stop())
}

// mustNewAddresses gives the machine outside another address of each family until
// the test ends: those that have been unused for the longest time.
func (s *Stage) mustNewAddresses(t testing.TB) (v4, v6 netip.Addr) {
	t.Helper()
	const first, count = 101, 150 // of 192.168.50.0/24, beside the nodes, the client and the gateway
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.outside) == count {
		t.Fatalf("%d clients outside at the same time, as many as there can be", count)
	}
	number := s.next
	for s.outside[number] {
		number = (number + 1) % count
	}
	s.outside[number], s.next = true, (number+1)%count
	prefixes := []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.168.50.%d/24", first+number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:50::%d/64", first+number)),
	}
	for _, prefix := range prefixes {
		lab.Must(t, s.Lab.Client.AddAddress("eth0", prefix))
	}
	t.Cleanup(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, prefix := range prefixes {
			if err := s.Lab.Client.RemoveAddress("eth0", prefix); err != nil {
				t.Error(err)
			}
		}
		delete(s.outside, number)
	})

	return prefixes[0].Addr(), prefixes[1].Addr()
}
