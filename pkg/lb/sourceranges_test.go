package lb

import (
	"net/netip"
	"slices"
	"testing"
)

func TestSourceRanges(t *testing.T) {
	for _, test := range []struct {
		name   string
		ranges []netip.Prefix
		v4, v6 []netip.Prefix
		node4  bool
		node6  bool
	}{
		{"none if the Service has none", nil, nil, nil, false, false},
		{"each family's own", prefixes("203.0.113.0/25", "2001:db8:a::/48"),
			prefixes("203.0.113.0/25"), prefixes("2001:db8:a::/48"), false, false},
		{"open for a family without a range", prefixes("203.0.113.0/25"), prefixes("203.0.113.0/25"), nil, false, false},
		{"open with a range of all addresses", prefixes("203.0.113.0/25", "0.0.0.0/0", "2001:db8:a::/48"),
			nil, prefixes("2001:db8:a::/48"), false, false},
		{"open with ranges that are none", []netip.Prefix{{}}, nil, nil, false, false},
		{"sorted, masked and without duplicates", prefixes("203.0.113.0/25", "198.51.100.7/24", "203.0.113.0/25"),
			prefixes("198.51.100.0/24", "203.0.113.0/25"), nil, false, false},
		{"the load balancers too if the node is inside", prefixes("192.168.0.0/16", "2001:db8::/64"),
			prefixes("1.2.3.4/32", "1.2.3.5/32", "192.168.0.0/16"), prefixes("2001:db8::/64", "2001:db8:f::4/128"), true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := web(dualStack, balanced, func(s *Service) {
				s.ExternalIPs = ips("192.0.2.1", "2001:db8:e::1")
				s.LoadBalancers = append(vips("1.2.3.4", "1.2.3.5", "2001:db8:f::4"), LoadBalancerIP{Addr: ip("1.2.3.6"), Proxy: true})
				s.SourceRanges = test.ranges
			})
			for _, f := range Resolve(svc, nil, &testNode).Frontends {
				var want []netip.Prefix
				inside := false
				if f.Kind == KindLoadBalancer {
					want, inside = test.v4, test.node4
					if f.Key.Addr.Is6() {
						want, inside = test.v6, test.node6
					}
				}
				if !slices.Equal(f.SourceRanges, want) || f.NodeInRanges != inside {
					t.Errorf("%s has source ranges %v, node inside: %v; want %v, %v", f.Key, f.SourceRanges, f.NodeInRanges, want, inside)
				}
			}
		})
	}
}

// As in kube-proxy, source ranges restrict a load balancer's address even if it is an
// address of another kind as well.
func TestSourceRangesFollowTheAddress(t *testing.T) {
	svc := web(func(s *Service) {
		s.SourceRanges = prefixes("203.0.113.0/25")
		s.LoadBalancers = vips("10.96.0.1", "192.0.2.1")
		s.ExternalIPs = ips("192.0.2.1", "192.0.2.2")
	})
	r := Resolve(svc, nil, &testNode)
	for key, restricted := range map[string]bool{
		"10.96.0.1:80/TCP external": true,
		"192.0.2.1:80/TCP external": true,
		"192.0.2.1:80/TCP internal": true,
		"192.0.2.2:80/TCP external": false,
		"10.96.0.1:*/any external":  false,
	} {
		if got := len(mustFrontend(t, r, key).SourceRanges) > 0; got != restricted {
			t.Errorf("%s is restricted: %v, want %v", key, got, restricted)
		}
	}
}

func TestNodeInRanges(t *testing.T) {
	for _, test := range []struct {
		name   string
		node   []netip.Addr
		ranges []netip.Prefix
		want   bool
	}{
		{"inside", ips("192.168.0.2"), prefixes("203.0.113.0/25", "192.168.0.2/32"), true},
		{"outside", ips("192.168.0.2"), prefixes("203.0.113.0/25"), false},
		{"inside by its IP of the family", ips("2001:db8::2", "192.168.0.2"), prefixes("192.168.0.2/32"), true},
		{"loopback if nothing is known", nil, prefixes("127.0.0.0/8"), true},
		{"loopback if only the other family is known", ips("2001:db8::2"), prefixes("127.0.0.0/8"), true},
		{"outside if nothing is known", nil, prefixes("192.168.0.0/16"), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := web(balanced, func(s *Service) { s.SourceRanges = test.ranges })
			r := Resolve(svc, nil, &Node{Name: "n1", PrimaryIPs: test.node})
			if got := mustFrontend(t, r, "1.2.3.4:80/TCP internal").NodeInRanges; got != test.want {
				t.Errorf("node in ranges is %v, want %v", got, test.want)
			}
		})
	}
}
