package agent

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/test/lab"
)

// What a configuration is held against: kube-proxy takes IPv4 for the family of a
// node that it knows nothing of.
func TestNodeFacts(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	cidr := netip.MustParsePrefix("10.0.0.0/24")
	for _, test := range []struct {
		name   string
		nodeIP netip.Addr
		ips    []netip.Addr
		want   config.Node
	}{
		{"nothing of an unknown node", netip.Addr{}, nil, config.Node{Primary: lb.IPv4, PodCIDRs: []netip.Prefix{cidr}}},
		{"the family of the first address", netip.Addr{}, []netip.Addr{v6, v4}, config.Node{Primary: lb.IPv6, IPs: []netip.Addr{v6, v4}, PodCIDRs: []netip.Prefix{cidr}}},
		{"the family of the bind address", v4, []netip.Addr{v6}, config.Node{Primary: lb.IPv4, IPs: []netip.Addr{v4, v6}, PodCIDRs: []netip.Prefix{cidr}}},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			var got config.Node
			a := newAgent(Config{
				NodeName: "node-1", NodeIP: test.nodeIP, Log: slog.New(slog.DiscardHandler),
				CheckNode: func(n config.Node) error { got = n; return nil },
			}, parts{})
			a.model.here.StopWaiting()
			a.model.setNode(kube.Node{Node: lb.Node{Name: "node-1", PrimaryIPs: test.ips}, Exists: true, PodCIDRs: []netip.Prefix{cidr}})
			lab.Must(t, a.checkNode())
			test.want.Families = node.Families()
			same := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
			samePrefix := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
			if diff := cmp.Diff(test.want, got, same, samePrefix); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
