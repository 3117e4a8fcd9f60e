package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
)

// limited returns a node with these limits.
func limited(limits Limits) *Node {
	node := testNode
	node.Limits = limits
	return &node
}

// named gives a Service ports of these names: 80, 81, …
func named(names ...string) func(*Service) {
	return func(s *Service) {
		s.Ports = nil
		for i, name := range names {
			s.Ports = append(s.Ports, ServicePort{Name: name, Protocol: TCP, Port: uint16(80 + i)})
		}
	}
}

// Frontends above the limit are left out and reported; all others are as without a
// limit. Frontends come in pairs, one of each scope, catch-alls too.
func TestLimitOfFrontends(t *testing.T) {
	const more = "with them the Service would have more frontends (addresses x ports x scopes) than the %d that one may have"
	externals := func(s *Service) { s.ExternalIPs = ips("192.0.2.1", "192.0.2.2", "192.0.2.3") }
	nodePorts := func(s *Service) {
		for i := range s.Ports {
			s.Ports[i].NodePort = uint16(30080 + i)
		}
	}
	for _, test := range []struct {
		name    string
		svc     *Service
		limit   int
		want    []string // the frontends
		problem string
	}{
		{"no limit", web(externals), 0, []string{"10.96.0.1:80", "192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80"}, ""},
		{"just enough", web(externals), 10, []string{"10.96.0.1:80", "192.0.2.1:80", "192.0.2.2:80", "192.0.2.3:80"}, ""},
		{"one external IP too many", web(externals), 9, []string{"10.96.0.1:80", "192.0.2.1:80", "192.0.2.2:80"},
			"spec.externalIPs[2]: from here on 1 are not in use: " + more},
		{"room for the ClusterIP only", web(externals), 4, []string{"10.96.0.1:80"},
			"spec.externalIPs[0]: from here on 3 are not in use: " + more},
		{"addresses have all ports or none", web(externals, named("a", "b")), 11,
			[]string{"10.96.0.1:80", "192.0.2.1:80", "10.96.0.1:81", "192.0.2.1:81"},
			"spec.externalIPs[1]: from here on 2 are not in use: " + more},
		{"one port too many", web(named("a", "b", "c")), 7, []string{"10.96.0.1:80", "10.96.0.1:81"},
			"spec.ports[2]: from here on 1 are not in use: " + more},
		{"node ports count", web(named("a", "b", "c"), nodePorts), 11, []string{"10.96.0.1:80", "0.0.0.0:30080", "10.96.0.1:81", "0.0.0.0:30081"},
			"spec.ports[2]: from here on 1 are not in use: " + more},
		{"both families count", web(dualStack, named("a", "b")), 11, []string{"10.96.0.1:80", "[fd00::1]:80"},
			"spec.ports[1]: from here on 1 are not in use: " + more},
		{"load balancers before external IPs", web(externals, func(s *Service) { s.LoadBalancers = vips("1.2.3.4", "1.2.3.5") }), 8,
			[]string{"10.96.0.1:80", "1.2.3.4:80", "1.2.3.5:80"},
			"spec.externalIPs[0]: from here on 3 are not in use: " + more},
		{"load balancers that are proxies do not count", web(func(s *Service) {
			s.LoadBalancers = []LoadBalancerIP{{Addr: ip("1.2.3.4"), Proxy: true}, {}, {Addr: ip("1.2.3.5")}}
		}), 6, []string{"10.96.0.1:80", "1.2.3.5:80"}, ""},
		{"no room at all", web(externals), 3, nil, "spec.ports[0]: from here on 1 are not in use: " + more},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(test.svc, nil, limited(Limits{Frontends: test.limit}))
			var got []string
			for _, f := range r.Frontends {
				if f.Key.Port != 0 && f.Key.Scope == Internal {
					got = append(got, netip.AddrPortFrom(f.Key.Addr, f.Key.Port).String())
				}
			}
			checkLines(t, got, test.want...)
			if test.limit > 0 && len(r.Frontends) > test.limit {
				t.Errorf("%d frontends, above the limit of %d", len(r.Frontends), test.limit)
			}
			if test.problem == "" {
				checkProblems(t, r)
			} else {
				checkProblems(t, r, "Service ns/web: "+fmt.Sprintf(test.problem, test.limit))
			}
		})
	}
}

// External IPs that the node ignores do not count.
func TestIgnoredExternalIPsDoNotCount(t *testing.T) {
	node := limited(Limits{Frontends: 4})
	node.IgnoreExternalIPs = true
	r := Resolve(web(func(s *Service) { s.ExternalIPs = ips("192.0.2.1") }), nil, node)
	checkProblems(t, r, "Service ns/web: spec.externalIPs[0]: 192.0.2.1 is not in use: the feature gate AllowServiceExternalIPs is off")
}

// With too many source ranges, no client may connect to the addresses that they restrict;
// it must never be every client.
func TestLimitOfSourceRanges(t *testing.T) {
	ranged := func(ranges ...string) func(*Service) {
		return func(s *Service) { s.SourceRanges = prefixes(ranges...) }
	}
	for _, test := range []struct {
		name  string
		svc   *Service
		limit int
		want  []string // the frontends, "restricted" or open to all clients
		count int      // in the problem, zero: there is none
	}{
		{"just enough", web(balanced, ranged("10.0.0.0/8", "11.0.0.0/8")), 3,
			[]string{"10.96.0.1:80", "1.2.3.4:80 restricted", "0.0.0.0:30080"}, 0},
		{"one too many", web(balanced, ranged("10.0.0.0/8", "11.0.0.0/8", "12.0.0.0/8")), 3,
			[]string{"10.96.0.1:80", "0.0.0.0:30080"}, 4},
		{"for each port", web(balanced, named("a", "b"), ranged("10.0.0.0/8")), 3,
			[]string{"10.96.0.1:80", "10.96.0.1:81"}, 4},
		{"a ClusterIP that is a load balancer's address", web(balanced, ranged("10.0.0.0/8"), func(s *Service) { s.LoadBalancers = vips("10.96.0.1") }), 1,
			[]string{"0.0.0.0:30080"}, 2},
		{"an external IP that is a load balancer's address", web(balanced, ranged("10.0.0.0/8"), func(s *Service) { s.ExternalIPs = ips("1.2.3.4", "1.2.3.5") }), 1,
			[]string{"10.96.0.1:80", "1.2.3.5:80", "0.0.0.0:30080"}, 2},
		{"nothing to restrict", web(ranged("10.0.0.0/8", "11.0.0.0/8")), 1, []string{"10.96.0.1:80"}, 0},
		{"a range of all addresses among them", web(balanced, ranged("10.0.0.0/8", "0.0.0.0/0")), 1,
			[]string{"10.96.0.1:80", "1.2.3.4:80", "0.0.0.0:30080"}, 0},
		{"the other family is not restricted anyway", web(dualStack, balanced, ranged("10.0.0.0/8", "11.0.0.0/8", "::/0"), func(s *Service) {
			s.LoadBalancers = vips("1.2.3.4", "2001:db8::4")
		}), 2, []string{"10.96.0.1:80", "0.0.0.0:30080", "[fd00::1]:80", "[2001:db8::4]:80", "[::]:30080"}, 3},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(test.svc, nil, limited(Limits{SourceRanges: test.limit}))
			var got []string
			for _, f := range r.Frontends {
				if f.Key.Port == 0 || f.Key.Scope != Internal {
					continue
				}
				line := netip.AddrPortFrom(f.Key.Addr, f.Key.Port).String()
				if len(f.SourceRanges) > 0 {
					line += " restricted"
				}
				got = append(got, line)
			}
			checkLines(t, got, test.want...)
			if test.count == 0 {
				checkProblems(t, r)
				return
			}
			checkProblems(t, r, fmt.Sprintf("Service ns/web: spec.loadBalancerSourceRanges: %d (ranges x ports) are more than the %d that one Service may have: "+
				"the load balancers' addresses that they restrict are not in use", test.count, test.limit))
		})
	}
}

// Source ranges apply to a ClusterIP that is a load balancer's address too, even if that
// address is above the limit of frontends.
func TestAddressAboveTheLimitRestricts(t *testing.T) {
	svc := web(func(s *Service) {
		s.LoadBalancers = vips("1.2.3.4", "10.96.0.1")
		s.SourceRanges = prefixes("10.0.0.0/8")
	})
	r := Resolve(svc, nil, limited(Limits{Frontends: 4}))
	if f := mustFrontend(t, r, "10.96.0.1:80/TCP external"); len(f.SourceRanges) == 0 {
		t.Error("every client may connect to the ClusterIP")
	}
}

// The endpoints that are left out above the limit are those of the last slices.
func TestLimitOfEndpoints(t *testing.T) {
	first := slice("a", endpoint("10.0.2.1"), endpoint("10.0.2.2"))
	second := slice("b", endpoint("10.0.2.3"), endpoint("10.0.2.4"))
	last := slice("c", endpoint("10.0.2.5"))
	foreign := slice("d", endpoint("10.0.2.6"))
	foreign.Service.Name = "other"
	unserved := slice("e", endpoint("10.0.2.7"))
	unserved.Ports = []EndpointPort{{Name: "metrics", Protocol: TCP, Port: 9090}}
	all := []*EndpointSlice{foreign, unserved, first, second, last}
	both := slices.Clone(all)
	for i, s := range both[2:] {
		two := *s
		two.Ports = []EndpointPort{{Name: "http", Protocol: TCP, Port: 8080}, {Name: "dns", Protocol: TCP, Port: 8053}}
		both[2+i] = &two
	}
	dns := func(s *Service) { s.Ports = append(s.Ports, ServicePort{Name: "dns", Protocol: TCP, Port: 53}) }
	for _, test := range []struct {
		name   string
		svc    *Service
		slices []*EndpointSlice
		limit  int
		want   int // endpoints of all ports
		over   bool
	}{
		{"no limit", web(), all, 0, 5, false},
		{"just enough", web(), all, 5, 5, false},
		{"one too many", web(), all, 4, 4, true},
		{"a part of a slice", web(), all, 3, 3, true},
		{"for each port", web(dns), both, 9, 8, true},
		{"not for ports that the Service does not have", web(), both, 5, 5, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(test.svc, test.slices, limited(Limits{Endpoints: test.limit}))
			if len(r.Endpoints) != test.want {
				t.Errorf("endpoints are %v, want %d", uses(r), test.want)
			}
			if !test.over {
				checkProblems(t, r)
				return
			}
			checkProblems(t, r, fmt.Sprintf("Service ns/web: endpoints: there are more than the %d (endpoints x ports) that one Service may have: "+
				"those above it, of the EndpointSlices that sort last, are not in use", test.limit))
		})
	}
	if len(first.Endpoints)+len(second.Endpoints)+len(last.Endpoints) != 5 {
		t.Error("a slice has changed")
	}
}

// Of a list in which every element is wrong, a hundred problems are reported, not thousands.
func TestProblemsAreLimited(t *testing.T) {
	svc := web(func(s *Service) { s.ExternalIPs = slices.Repeat(ips("2001:db8::1"), 10_000) })
	r := Resolve(svc, nil, &testNode)
	if n := len(r.Problems); n != MaxProblems+1 {
		t.Fatalf("%d problems, want %d", n, MaxProblems+1)
	}
	want := "Service ns/web: there are more problems than these 100"
	if got := r.Problems[MaxProblems].String(); got != want {
		t.Errorf("the last one is %q, want %q", got, want)
	}
}
