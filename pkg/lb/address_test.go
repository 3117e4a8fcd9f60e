package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
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

// No Service has an address that means another destination in each network namespace, or on each link, wherever it stands;
// its others are in use, and its Event names the field.
func TestSpecialAddresses(t *testing.T) {
	for _, special := range ips(
		"127.0.0.1", "127.9.9.9", "0.0.0.0", "169.254.169.254", "224.0.0.251", "239.255.255.250", "255.255.255.255", "::ffff:127.0.0.1",
		"::1", "::", "fe80::1", "febf::1", "ff01::1", "ff02::fb", "ff05::1:3", "ff0e::101",
	) {
		for field, edit := range map[string]func(*Service){
			"spec.clusterIPs[%d]":                func(s *Service) { s.ClusterIPs[(FamilyOf(special)-IPv4)/2] = special },
			"spec.externalIPs[%d]":               func(s *Service) { s.ExternalIPs = append(s.ExternalIPs, special) },
			"status.loadBalancer.ingress[%d].ip": func(s *Service) { s.LoadBalancers = append(s.LoadBalancers, LoadBalancerIP{Addr: special}) },
		} {
			svc := web(dualStack, func(s *Service) {
				s.ClusterIPs = slices.Clone(s.ClusterIPs)
				s.ExternalIPs, s.LoadBalancers = ips("192.0.2.1", "2001:db8:e::1"), vips("1.2.3.4", "2001:db8:f::4")
				edit(s)
			})
			r := Resolve(svc, nil, &testNode)
			found := 0
			for _, f := range r.Frontends {
				if f.Key.Addr == special && f.Kind != KindNodePort {
					t.Errorf("%s: there is a frontend %s", fmt.Sprintf(field, 0), f.Key)
				}
				if f.Kind != KindNodePort {
					found++
				}
			}
			if found == 0 {
				t.Errorf("%s of %s takes all frontends away", special, field)
			}
			if !slices.ContainsFunc(r.Problems, func(p Problem) bool {
				return strings.HasPrefix(p.Field, field[:strings.Index(field, "%")]) && strings.Contains(p.String(), special.String()+" is not in use")
			}) {
				t.Errorf("%s: the problems are %v", fmt.Sprintf(field, 0), r.Problems)
			}
		}
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

func TestNodePortAddresses(t *testing.T) {
	local := ips("127.0.0.1", "192.168.0.2", "192.168.1.2", "10.244.1.1", "::1", "2001:db8::2", "2001:db8:1::2")
	const (
		allV4 = "192.168.0.2 192.168.1.2 10.244.1.1"
		allV6 = "2001:db8::2 2001:db8:1::2"
	)
	for _, test := range []struct {
		name    string
		list    []string
		primary []netip.Addr
		want    string
		all     string // families
	}{
		{"the node IPs by default", nil, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 2001:db8::2", ""},
		{"the node IPs as primary", []string{"primary"}, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 2001:db8::2", ""},
		{"all of a family without node IP", nil, ips("192.168.0.2"), "192.168.0.2 " + allV6, "IPv6"},
		{"all without node IPs", nil, nil, allV4 + " " + allV6, "IPv4 IPv6"},
		{"all if the node IPs are loopback", nil, ips("127.0.0.1", "::1"), allV4 + " " + allV6, "IPv4 IPv6"},
		{"none if the node IP is not the node's", nil, ips("192.0.2.1", "2001:db8:2::"), "", ""},
		{"those in the ranges", []string{"192.168.0.0/16", "2001:db8:1::/48"}, nil, "192.168.0.2 192.168.1.2 2001:db8:1::2", ""},
		{"all of a family without range", []string{"192.168.0.0/24"}, nil, "192.168.0.2 " + allV6, "IPv6"},
		{"all with a range of everything", []string{"192.168.0.0/24", "0.0.0.0/0", "2001:db8:1::/48"}, nil, allV4 + " 2001:db8:1::2", "IPv4"},
		{"never loopback", []string{"127.0.0.0/8", "::1/128"}, nil, "", ""},
		{"none for localhost alone", []string{"localhost"}, ips("192.168.0.2"), "", ""},
		{"all for all", []string{"all"}, ips("192.168.0.2"), allV4 + " " + allV6, "IPv4 IPv6"},
		{"all for all beside others", []string{"192.168.0.0/24", "all", "primary", "localhost"}, ips("192.168.0.2"), allV4 + " " + allV6, "IPv4 IPv6"},
		{"the node IPs and a range", []string{"primary", "10.0.0.0/8"}, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 10.244.1.1 2001:db8::2", ""},
		{"the node IP and a range of the other family", []string{"2001:db8:1::/48", "primary"}, ips("192.168.0.2"), "192.168.0.2 2001:db8:1::2", ""},
		{"a range alone if primary adds none", []string{"primary", "10.0.0.0/8"}, nil, "10.244.1.1 " + allV6, "IPv6"},
		{"the node IPs beside localhost", []string{"primary", "localhost"}, ips("192.168.0.2", "2001:db8::2"), "192.168.0.2 2001:db8::2", ""},
		{"none of a family that has localhost alone", []string{"primary", "localhost"}, ips("192.168.0.2"), "192.168.0.2", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, err := ParseNodePortAddresses(test.list)
			if err != nil {
				t.Fatal(err)
			}
			selected := n.Select(local, test.primary)
			if got := strings.Trim(fmt.Sprint(selected), "[]"); got != test.want {
				t.Errorf("selected %s, want %s", got, test.want)
			}
			var all []string
			for _, family := range []Family{IPv4, IPv6} {
				if n.All(family, test.primary) {
					all = append(all, family.String())
				}
			}
			if got := strings.Join(all, " "); got != test.all {
				t.Errorf("all are selected of %q, want %q", got, test.all)
			}
		})
	}
}

// Whether processes of the node reach node ports on 127.0.0.1 and ::1.
func TestNodePortsOnLoopback(t *testing.T) {
	for _, test := range []struct {
		list   string
		v4, v6 bool
	}{
		{"primary", false, false},
		{"localhost", true, true},
		{"all", true, true},
		{"primary localhost", true, true},
		{"primary all", true, true},
		{"primary 10.0.0.0/8", false, false},
		{"10.0.0.0/8 fd00::/8", false, false},
		{"10.0.0.0/8 localhost", true, true},
		{"127.0.0.1/32 fd00::/8", true, false},
		{"10.0.0.0/8 ::1/128", false, true},
		{"0.0.0.0/0 fd00::/8", true, false},
		{"10.0.0.0/8", false, true}, // all of IPv6
		{"127.1.0.0/16 fd00::/8", false, false},
	} {
		n, err := ParseNodePortAddresses(strings.Fields(test.list))
		if err != nil {
			t.Fatal(err)
		}
		if v4, v6 := n.Loopback(IPv4), n.Loopback(IPv6); v4 != test.v4 || v6 != test.v6 {
			t.Errorf("%s: on 127.0.0.1 %t and on ::1 %t, want %t and %t", test.list, v4, v6, test.v4, test.v6)
		}
	}
}

func TestParseNodePortAddresses(t *testing.T) {
	for _, test := range []struct {
		name string
		list []string
		err  string
	}{
		{"fine with ranges", []string{"10.0.0.0/8", "fd00::/8"}, ""},
		{"an error with something else", []string{"10.0.0.0/8", "10.0.0.1"}, `nodePortAddresses[1]: "10.0.0.1" is not an address range: no slash`},
		{"fine with words and a range", []string{"primary", "10.0.0.0/8", "localhost", "all"}, ""},
		{"an error with another word", []string{"primary", "loopback"}, `nodePortAddresses[1]: "loopback" is not an address range: no slash`},
	} {
		t.Run(test.name, func(t *testing.T) {
			n, err := ParseNodePortAddresses(test.list)
			if got := errorText(err); got != test.err {
				t.Errorf("error is %q, want %q", got, test.err)
			}
			if err != nil && len(n.Prefixes) != 0 {
				t.Errorf("%v came with the error", n)
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestParseAddr(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"IPv4", "10.0.0.1", "10.0.0.1"},
		{"IPv6", "fd00::1", "fd00::1"},
		{"canonical", "FD00:0:0:0:0:0:0:0001", "fd00::1"},
		{"decimal despite leading zeros", "172.30.0.041", "172.30.0.41"},
		{"decimal despite many leading zeros", "0010.0000.00.0000099", "10.0.0.99"},
		{"IPv6 with leading zeros", "02001:0db8:00000::01", "2001:db8::1"},
		{"IPv4 though written as IPv6", "::ffff:10.0.0.1", "10.0.0.1"},
		{"IPv4 though written as IPv6 with leading zeros", "::ffff:010.0.0.01", "10.0.0.1"},
		{"IPv6 that ends as IPv4", "64:ff9b::10.0.0.010", "64:ff9b::a00:a"},
		{"all zeros", "000.0.0.0", "0.0.0.0"},
		{"an error if blank", "", ""},
		{"an error with space", " 10.0.0.1", ""},
		{"an error with a zone", "fe80::1%eth0", ""},
		{"an error if too big", "10.0.0.256", ""},
		{"an error if too short", "10.0.1", ""},
		{"an error with an empty number", "10..0.1", ""},
		{"an error in hexadecimal", "0x0a.0.0.1", ""},
		{"an error as a range", "10.0.0.0/8", ""},
		{"an error as a name", "localhost", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr, err := ParseAddr(test.text)
			got := ""
			if err == nil {
				got = addr.String()
			}
			if got != test.want || addr.IsValid() != (err == nil) {
				t.Errorf("ParseAddr(%q) = %v, %v; want %q", test.text, addr, err, test.want)
			}
		})
	}
}

func TestParsePrefix(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"IPv4", "10.0.0.0/8", "10.0.0.0/8"},
		{"IPv6", "fd00::/64", "fd00::/64"},
		{"masked", "10.1.2.3/8", "10.0.0.0/8"},
		{"decimal despite leading zeros", "203.0.113.000/025", "203.0.113.0/25"},
		{"trimmed", "  203.0.113.7/32 \n", "203.0.113.7/32"},
		{"all addresses", "0.0.0.0/0", "0.0.0.0/0"},
		{"IPv4 though written as IPv6", "::ffff:10.1.2.3/104", "10.0.0.0/8"},
		{"an error as IPv4 and IPv6 at once", "::ffff:10.1.2.3/95", ""},
		{"an error without length", "10.0.0.0", ""},
		{"an error with an empty length", "10.0.0.0/", ""},
		{"an error if too long", "10.0.0.0/33", ""},
		{"an error if far too long", "fd00::/129", ""},
		{"an error with a signed length", "10.0.0.0/+8", ""},
		{"an error with a mask", "10.0.0.0/255.0.0.0", ""},
		{"an error with space inside", "10.0.0.0 /8", ""},
		{"an error with a zone", "fe80::1%eth0/64", ""},
		{"an error if blank", " ", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			prefix, err := ParsePrefix(test.text)
			got := ""
			if err == nil {
				got = prefix.String()
			}
			if got != test.want || prefix.IsValid() != (err == nil) {
				t.Errorf("ParsePrefix(%q) = %v, %v; want %q", test.text, prefix, err, test.want)
			}
		})
	}
}
