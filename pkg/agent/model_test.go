package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

var (
	primary   = netip.MustParseAddr("10.1.1.1")
	secondary = netip.MustParseAddr("10.1.2.1")
	loopback  = netip.MustParseAddr("127.0.0.1")
)

func local() []node.Address {
	return []node.Address{
		{Addr: primary, IfIndex: 2}, {Addr: secondary, IfIndex: 3},
		{Addr: loopback, IfIndex: 1, IsLoopback: true},
	}
}

func nodeWith(addrs ...netip.Addr) kube.Node {
	return kube.Node{Node: lb.Node{Name: "node-1", PrimaryIPs: addrs}, Exists: true}
}

// Node ports must neither be lost nor answer on too many addresses because
// something is not known yet.
func TestNodeAddrs(t *testing.T) {
	for _, test := range []struct {
		name string
		do   func(*model)
		want []netip.Addr // nil: not known yet
	}{
		{"too early without local addresses", func(m *model) { m.setNode(nodeWith(primary)) }, nil},
		{"none before the Node is received", func(m *model) { m.setLocalAddrs(local()) }, []netip.Addr{}},
		{"none before the Node has addresses", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(nodeWith())
			m.nodeReceived()
		}, []netip.Addr{}},
		{"the address of an earlier agent's node ports before the Node is received", func(m *model) {
			m.hadNodePorts = map[netip.Addr]bool{secondary: true, netip.MustParseAddr("192.0.2.9"): true}
			m.setLocalAddrs(local())
		}, []netip.Addr{secondary}},
		{"the primary address, whatever an earlier agent's was", func(m *model) {
			m.hadNodePorts = map[netip.Addr]bool{secondary: true}
			m.setLocalAddrs(local())
			m.setNode(nodeWith(primary))
		}, []netip.Addr{primary}},
		{"the primary address", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(nodeWith(primary))
		}, []netip.Addr{primary}},
		{"the primary address still when the Node is gone", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(nodeWith(primary))
			m.setNode(kube.Node{Node: lb.Node{Name: "node-1"}})
			m.nodeReceived()
		}, []netip.Addr{primary}},
		{"every address if there is no Node", func(m *model) {
			m.setLocalAddrs(local())
			m.nodeReceived()
		}, []netip.Addr{primary, secondary}},
		{"every address when waiting is over", func(m *model) {
			m.setLocalAddrs(local())
			m.setNode(nodeWith())
			m.stopWaiting()
		}, []netip.Addr{primary, secondary}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newModel(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, parts{})
			test.do(m)
			addrs, ok := m.newNodeAddrs()
			if ok != (test.want != nil) {
				t.Fatalf("known is %t, want %t", ok, test.want != nil)
			}
			for i, addr := range []netip.Addr{primary, secondary, loopback} {
				if use, has := addrs[addr]; has != ok || ok && use.Ifindex != []uint32{2, 3, 1}[i] {
					t.Errorf("the node has %s: %t, on device %d", addr, has, use.Ifindex)
				}
				have := addrs[addr].Flags&maps.AddrNodePort != 0
				want := false
				for _, a := range test.want {
					want = want || a == addr
				}
				if have != want {
					t.Errorf("node ports answer on %s: %t, want %t", addr, have, want)
				}
			}
			if _, again := m.newNodeAddrs(); again {
				t.Error("unchanged addresses count as new")
			}
		})
	}
}

// Whose traffic is that of pods: no pod may count as an external client because something is
// not known yet.
func TestLocalCIDRs(t *testing.T) {
	cluster := mustPrefixes(t, "10.244.0.0/16", "fd00::/48")
	podCIDRs := mustPrefixes(t, "10.244.1.0/24", "10.244.2.0/24", "fd00:1::/64")
	first := mustPrefixes(t, "10.244.1.0/24", "fd00:1::/64")
	withCIDRs := func(podCIDRs []netip.Prefix) kube.Node {
		n := nodeWith(primary)
		n.PodCIDRs = podCIDRs

		return n
	}
	byNode := node.LocalDetector{Mode: node.LocalNodeCIDR}
	for _, test := range []struct {
		name     string
		detector node.LocalDetector
		do       func(*model)
		known    bool
		want     []netip.Prefix
	}{
		{"none by device, at once", node.LocalDetector{}, func(*model) {}, true, nil},
		{"none by device, whatever the Node has", node.LocalDetector{}, func(m *model) { m.setNode(withCIDRs(podCIDRs)) }, true, nil},
		{"none by bridge, whatever the cluster has", node.LocalDetector{Mode: node.LocalBridgeInterface, ClusterCIDRs: cluster}, func(*model) {}, true, nil},
		{"the cluster's, at once", node.LocalDetector{Mode: node.LocalClusterCIDR, ClusterCIDRs: cluster}, func(*model) {}, true, cluster},
		{"the cluster's, whatever the Node has", node.LocalDetector{Mode: node.LocalClusterCIDR, ClusterCIDRs: cluster}, func(m *model) { m.setNode(withCIDRs(podCIDRs)) }, true, cluster},
		{"too early before the Node is received", byNode, func(*model) {}, false, nil},
		{"too early before the Node has them", byNode, func(m *model) { m.setNode(withCIDRs(nil)); m.nodeReceived() }, false, nil},
		{"the Node's first of each family", byNode, func(m *model) { m.setNode(withCIDRs(podCIDRs)) }, true, first},
		{"the Node's, not the cluster's", node.LocalDetector{Mode: node.LocalNodeCIDR, ClusterCIDRs: cluster}, func(m *model) { m.setNode(withCIDRs(podCIDRs)) }, true, first},
		{"the Node's new ones", byNode, func(m *model) {
			m.setNode(withCIDRs(podCIDRs))
			m.newLocalCIDRs()
			m.setNode(withCIDRs(podCIDRs[1:]))
		}, true, podCIDRs[1:]},
		{"the Node's still when it is gone", byNode, func(m *model) {
			m.setNode(withCIDRs(podCIDRs))
			m.setNode(kube.Node{Node: lb.Node{Name: "node-1"}})
			m.nodeReceived()
		}, true, first},
		{"none if there is no Node", byNode, (*model).nodeReceived, true, nil},
		{"the Node's when they come after all", byNode, func(m *model) {
			m.stopWaiting()
			m.newLocalCIDRs()
			m.setNode(withCIDRs(podCIDRs))
		}, true, first},
		{"none when waiting is over", byNode, func(m *model) { m.setNode(withCIDRs(nil)); m.stopWaiting() }, true, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newModel(Config{NodeName: "node-1", Local: test.detector, Log: slog.New(slog.DiscardHandler)}, parts{})
			test.do(m)
			got, known := m.newLocalCIDRs()
			if known != test.known || !slices.Equal(got, test.want) {
				t.Errorf("they are %v (known: %t), want %v (%t)", got, known, test.want, test.known)
			}
			m.setNode(withCIDRs(m.podCIDRs))
			if again, changed := m.newLocalCIDRs(); changed && known {
				t.Errorf("unchanged ranges count as new: %v", again)
			}
		})
	}
}

// MasqueradeAll is the agent's, and no Node object takes it away.
func TestMasqueradeAllStays(t *testing.T) {
	for _, on := range []bool{true, false} {
		m := newModel(Config{NodeName: "node-1", MasqueradeAll: on, Log: slog.New(slog.DiscardHandler)}, parts{})
		m.state.SetService(*web())
		masqueraded := func() bool {
			res, _ := m.state.Resolve(web().Name)

			return res.Frontends[0].Masquerade
		}
		before := masqueraded()
		m.setNode(nodeWith(primary))
		if after := masqueraded(); before != on || after != on {
			t.Errorf("masqueraded is %t, and %t once the Node is received, want %t", before, after, on)
		}
	}
}

// So are the algorithm and whether external IPs count.
func TestNodeOptionsStay(t *testing.T) {
	m := newModel(Config{
		NodeName: "node-1", Algorithm: lb.Maglev, IgnoreExternalIPs: true, Log: slog.New(slog.DiscardHandler),
	}, parts{})
	svc := *web()
	svc.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	m.state.SetService(svc)
	check := func(when string) {
		t.Helper()
		res, _ := m.state.Resolve(svc.Name)
		for _, f := range res.Frontends {
			if f.Kind == lb.KindExternalIP || f.Key.Port != 0 && f.Algorithm != lb.Maglev {
				t.Errorf("%s, there is %s, by %s", when, f.Key, f.Algorithm)
			}
		}
	}
	check("at first")
	m.setNode(nodeWith(primary))
	check("once the Node is received")
	m.setNode(kube.Node{Node: lb.Node{Name: "node-1"}})
	check("when the Node is gone")
}

func TestReportLogsWhatIsNew(t *testing.T) {
	var log bytes.Buffer
	m := newModel(Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, parts{})
	bad := lb.Problem{Object: "Service ns/web", Field: "spec.externalIPs[0]", Message: "not an address"}
	m.report("Service ns/web", []lb.Problem{bad})
	m.report("Service ns/web", []lb.Problem{bad})
	if n := strings.Count(log.String(), "spec.externalIPs[0]"); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
	if len(m.allProblems()) != 1 {
		t.Errorf("problems are %v, want one", m.allProblems())
	}
	m.report("Service ns/web", nil)
	if len(m.allProblems()) != 0 {
		t.Errorf("problems are %v, want none", m.allProblems())
	}
}

func TestEventQueueKeepsOrder(t *testing.T) {
	box := newEventQueue(nil, time.Now)
	var got [4][]int
	var senders sync.WaitGroup
	for sender := range got {
		senders.Go(func() {
			for i := range 1000 {
				box.enqueue(func(*model) { got[sender] = append(got[sender], i) })
			}
		})
	}
	go func() { senders.Wait(); close(box.ready) }()
	for range box.ready {
		for _, change := range box.drain() {
			change(nil)
		}
	}
	for _, change := range box.drain() {
		change(nil)
	}
	for sender, numbers := range got {
		if len(numbers) != 1000 {
			t.Fatalf("sender %d: %d changes arrived, want 1000", sender, len(numbers))
		}
		for i, n := range numbers {
			if i != n {
				t.Fatalf("sender %d: change %d arrived as number %d", sender, n, i)
			}
		}
	}
}

// wakingSink is a sink of which the loop works on each change at once, and not the test.
type wakingSink struct{ sink }

func sinkOf(m *eventQueue) wakingSink { return wakingSink{sink{m}} }

func (to wakingSink) SetService(svc lb.Service, problems []lb.Problem) {
	to.sink.SetService(svc, problems)
	to.wake()
}

func (to wakingSink) DeleteService(name lb.ServiceName) {
	to.sink.DeleteService(name)
	to.wake()
}

func (to wakingSink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	to.sink.SetSlice(slice, problems)
	to.wake()
}

func mustPrefixes(t *testing.T, list ...string) []netip.Prefix {
	t.Helper()
	prefixes, err := node.ParseClusterCIDRs(strings.Join(list, ","))
	if err != nil {
		t.Fatal(err)
	}

	return prefixes
}

// web is a Service with everything that a frontend can have.
func web() *lb.Service {
	return &lb.Service{
		Name:           lb.ServiceName{Namespace: "ns", Name: "web"},
		Type:           lb.LoadBalancer,
		ClusterIPs:     []netip.Addr{netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("fd00::1")},
		Families:       []lb.Family{lb.IPv4, lb.IPv6},
		LoadBalancers:  []lb.LoadBalancerIP{{Addr: netip.MustParseAddr("192.0.2.1")}},
		SourceRanges:   []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("10.0.0.0/8")},
		ExternalPolicy: lb.Local,
		Affinity:       time.Hour,
		Ports: []lb.ServicePort{
			{Name: "http", Protocol: lb.TCP, Port: 80, NodePort: 30080},
			{Name: "dns", Protocol: lb.UDP, Port: 53},
		},
	}
}
