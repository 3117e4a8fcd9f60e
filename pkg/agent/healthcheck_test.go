package agent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// Where health check node ports answer follows the node's addresses.
func TestCheckAddrs(t *testing.T) {
	linkLocal := netip.MustParseAddr("fe80::1")
	global := netip.MustParseAddr("2001:db8::1")
	dual := append(local(), node.Address{Addr: linkLocal, IfIndex: 2}, node.Address{Addr: linkLocal, IfIndex: 3}, node.Address{Addr: global, IfIndex: 2})
	for _, test := range []struct {
		name    string
		ranges  string
		local   []node.Address
		primary []netip.Addr
		want    string
	}{
		{"the primary one", "primary", local(), []netip.Addr{primary}, "[10.1.1.1]"},
		{"the primary one of each family", "primary", dual, []netip.Addr{primary, global}, "[10.1.1.1 2001:db8::1]"},
		{"all of a family without a primary one", "primary", dual, []netip.Addr{primary}, "[10.1.1.1 ::]"},
		{"all of the families that the node has", "primary", local(), nil, "[0.0.0.0]"},
		{"all", "0.0.0.0/0,::/0", dual, []netip.Addr{primary}, "[0.0.0.0 ::]"},
		{"those in ranges, link-local ones with their device", "10.1.0.0/16,fe80::/10", dual, nil, "[10.1.1.1 10.1.2.1 fe80::1%2 fe80::1%3]"},
		{"none if the primary one is not the node's", "primary", local(), []netip.Addr{netip.MustParseAddr("192.0.2.9")}, "[]"},
		{"one that two devices have", "10.1.1.1/32", append(local(), node.Address{Addr: primary, IfIndex: 9}), nil, "[10.1.1.1]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ranges, err := lb.ParseNodePortAddresses(strings.Split(test.ranges, ","))
			if err != nil {
				t.Fatal(err)
			}
			m := newModel(Config{NodeName: "node-1", NodePortAddresses: ranges, Log: slog.New(slog.DiscardHandler)}, parts{})
			m.setLocalAddrs(test.local)
			m.setNode(nodeWith(test.primary...))
			if got := fmt.Sprint(m.checkAddrs()); got != test.want {
				t.Errorf("they are %s, want %s", got, test.want)
			}
		})
	}
}

// The configured address takes the place of the Node's, whatever the Node has.
func TestNodeIP(t *testing.T) {
	v4, v6 := netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00::1")
	other4, other6 := netip.MustParseAddr("10.1.1.9"), netip.MustParseAddr("fd00::9")
	gone := kube.Node{Node: lb.Node{Name: "node-1"}}
	for _, test := range []struct {
		name   string
		nodeIP netip.Addr
		nodes  []kube.Node
		want   []netip.Addr
	}{
		{"the Node's", netip.Addr{}, []kube.Node{nodeWith(v4, v6)}, []netip.Addr{v4, v6}},
		{"the Node's new ones", netip.Addr{}, []kube.Node{nodeWith(v4, v6), nodeWith(other6, other4)}, []netip.Addr{other6, other4}},
		{"the Node's still when it has none", netip.Addr{}, []kube.Node{nodeWith(v4, v6), nodeWith()}, []netip.Addr{v4, v6}},
		{"the Node's still when it is gone", netip.Addr{}, []kube.Node{nodeWith(v4, v6), gone}, []netip.Addr{v4, v6}},
		{"that of a family of which the Node has none any more", netip.Addr{}, []kube.Node{nodeWith(v4, v6), nodeWith(other4)}, []netip.Addr{other4, v6}},
		{"the new ones of a Node that is back", netip.Addr{}, []kube.Node{nodeWith(v4, v6), gone, nodeWith(other4, other6)}, []netip.Addr{other4, other6}},
		{"the configured one alone", other4, nil, []netip.Addr{other4}},
		{"the configured one for that of its family", other4, []kube.Node{nodeWith(v4, v6)}, []netip.Addr{other4, v6}},
		{"the configured one first", other6, []kube.Node{nodeWith(v4, v6)}, []netip.Addr{other6, v4}},
		{"the configured one, whatever the Node has next", other6, []kube.Node{nodeWith(v4, v6), nodeWith(other4), gone}, []netip.Addr{other6, other4}},
		{"the configured one beside the one that is left", other4, []kube.Node{nodeWith(v6)}, []netip.Addr{other4, v6}},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := newModel(Config{NodeName: "node-1", NodeIP: test.nodeIP, Log: slog.New(slog.DiscardHandler)}, parts{})
			for _, n := range test.nodes {
				m.setNode(n)
			}
			if !slices.Equal(m.node.PrimaryIPs, test.want) {
				t.Errorf("they are %v, want %v", m.node.PrimaryIPs, test.want)
			}
		})
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
	m.setLocalAddrs(local())
	if addrs, ok := m.newNodeAddrs(); !ok || addrs[primary].Flags != 0 || addrs[secondary].Flags != 0 {
		t.Errorf("node ports do not wait for the Node: they answer at %v (known: %t)", addrs, ok)
	}
	m.setNode(nodeWith(secondary))
	if addrs, ok := m.newNodeAddrs(); !ok || addrs[primary].Flags == 0 || addrs[secondary].Flags != 0 {
		t.Errorf("node ports answer at %v (known: %t)", addrs, ok)
	}
}
