package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

var (
	primary   = netip.MustParseAddr("10.1.1.1")
	secondary = netip.MustParseAddr("10.1.2.1")
)

func nodeWith(addrs ...netip.Addr) kube.Node {
	return kube.Node{Node: lb.Node{Name: "node-1", PrimaryIPs: addrs}, Exists: true}
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
	if len(m.problems) != 1 {
		t.Errorf("problems are %v, want one", m.problems)
	}
	m.report("Service ns/web", nil)
	if len(m.problems) != 0 {
		t.Errorf("problems are %v, want none", m.problems)
	}
}

// wakingSink is a sink of which the loop works on each change at once, and not the test.
type wakingSink struct{ sink }

func sinkOf(a *agent) wakingSink { return wakingSink{sink{a.queue, a.metrics}} }

func (to wakingSink) SetService(svc lb.Service, problems []lb.Problem) {
	to.sink.SetService(svc, problems)
	to.Enqueue(func(*model) {})
}

func (to wakingSink) DeleteService(name lb.ServiceName) {
	to.sink.DeleteService(name)
	to.Enqueue(func(*model) {})
}

func (to wakingSink) SetSlice(slice kube.Slice, problems []lb.Problem) {
	to.sink.SetSlice(slice, problems)
	to.Enqueue(func(*model) {})
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

// The configured address is what source ranges are held against, also before
// the Node is received; node ports wait for the Node, which knows the other family.
func TestNodeIPBeforeTheNode(t *testing.T) {
	m := newModel(Config{NodeName: "node-1", NodeIP: primary, Log: slog.New(slog.DiscardHandler)}, parts{})
	svc := web()
	svc.SourceRanges = []netip.Prefix{netip.PrefixFrom(primary, 32)}
	m.state.SetService(*svc)
	res, _ := m.state.Resolve(svc.Name)
	inside := slices.ContainsFunc(res.Frontends, func(f lb.Frontend) bool { return f.NodeInRanges })
	if !inside {
		t.Error("the node is in none of the source ranges")
	}
	m.here.SetState(node.State{Addresses: []node.Address{{Addr: primary, IfIndex: 2}, {Addr: secondary, IfIndex: 3}}})
	if addrs, ok := m.here.NewAddrs(); !ok || addrs[primary].Flags != 0 || addrs[secondary].Flags != 0 {
		t.Errorf("node ports do not wait for the Node: they answer at %v (known: %t)", addrs, ok)
	}
	m.setNode(nodeWith(secondary))
	if addrs, ok := m.here.NewAddrs(); !ok || addrs[primary].Flags == 0 || addrs[secondary].Flags != 0 {
		t.Errorf("node ports answer at %v (known: %t)", addrs, ok)
	}
}
