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

func TestProblems(t *testing.T) {
	const special = " is not in use: an unspecified, loopback, link-local, multicast or broadcast address means another destination in each network namespace"
	ports := func(ports ...ServicePort) *Service { return web(func(s *Service) { s.Ports = ports }) }
	for _, test := range []struct {
		name string
		svc  *Service
		want []string
	}{
		{"nothing", web(dualStack, balanced, externalLocal), nil},
		{"nothing about what pkg/kube has said already", web(balanced, func(s *Service) {
			s.ExternalIPs, s.LoadBalancers = []netip.Addr{{}}, []LoadBalancerIP{{}}
		}), nil},
		{"nothing about a load balancer that proxies", web(func(s *Service) {
			s.LoadBalancers = []LoadBalancerIP{{Addr: ip("2001:db8::1"), Proxy: true}}
		}), nil},
		{"an external IP of a family that is missing", web(func(s *Service) { s.ExternalIPs = ips("192.0.2.1", "2001:db8::1") }),
			[]string{"Service ns/web: spec.externalIPs[1]: 2001:db8::1 is not in use: the Service has no IPv6 ClusterIP"}},
		{"a load balancer of a family that is missing", web(func(s *Service) { s.LoadBalancers = vips("2001:db8::1") }),
			[]string{"Service ns/web: status.loadBalancer.ingress[0].ip: 2001:db8::1 is not in use: the Service has no IPv6 ClusterIP"}},
		{"special addresses", web(dualStack, func(s *Service) {
			s.ExternalIPs = ips("0.0.0.0", "169.254.169.254")
			s.LoadBalancers = vips("127.0.0.1", "::1")
		}), []string{
			"Service ns/web: spec.externalIPs[0]: 0.0.0.0" + special,
			"Service ns/web: spec.externalIPs[1]: 169.254.169.254" + special,
			"Service ns/web: status.loadBalancer.ingress[0].ip: 127.0.0.1" + special,
			"Service ns/web: status.loadBalancer.ingress[1].ip: ::1" + special,
		}},
		{"a special ClusterIP", web(func(s *Service) { s.ClusterIPs = ips("127.0.0.2") }),
			[]string{"Service ns/web: spec.clusterIPs[0]: 127.0.0.2" + special}},
		{"a ClusterIP that is not listed", web(dualStack, func(s *Service) { s.Families = []Family{IPv4} }),
			[]string{"Service ns/web: spec.clusterIPs[1]: fd00::1 is not in use: spec.ipFamilies does not have its family there"}},
		{"no health check port", web(balanced, externalLocal, func(s *Service) { s.HealthCheckNodePort = 0 }),
			[]string{"Service ns/web: spec.healthCheckNodePort: missing: load balancers cannot find out which nodes have local endpoints"}},
		{"source ranges that leave a family open", web(dualStack, func(s *Service) {
			s.LoadBalancers = vips("1.2.3.4", "2001:db8::4")
			s.SourceRanges = prefixes("203.0.113.0/25")
		}), []string{"Service ns/web: spec.loadBalancerSourceRanges: none of family IPv6: every client may connect to the IPv6 load balancers"}},
		{"a port without number", ports(ServicePort{"a", TCP, 0, 0}), []string{"Service ns/web: spec.ports[0].port: must not be zero"}},
		{"a port without protocol", ports(ServicePort{"a", AnyProtocol, 80, 0}),
			[]string{"Service ns/web: spec.ports[0].protocol: neither TCP nor UDP nor SCTP"}},
		{"a name twice", ports(ServicePort{"a", TCP, 80, 0}, ServicePort{"a", TCP, 81, 0}),
			[]string{`Service ns/web: spec.ports[1].name: an earlier port has the name "a" too`}},
		{"nothing about a name that two protocols have", ports(ServicePort{"a", TCP, 80, 0}, ServicePort{"a", UDP, 80, 0}), nil},
		{"a port twice", ports(ServicePort{"a", TCP, 80, 0}, ServicePort{"b", TCP, 80, 0}, ServicePort{"c", TCP, 80, 0}),
			[]string{
				`Service ns/web: spec.ports[1].port: 80/TCP is that of port "a" already`,
				`Service ns/web: spec.ports[2].port: 80/TCP is that of port "a" already`,
			}},
		{"a node port twice", ports(ServicePort{"a", TCP, 80, 30080}, ServicePort{"b", TCP, 81, 30080}, ServicePort{"c", UDP, 81, 30080}),
			[]string{`Service ns/web: spec.ports[1].nodePort: 30080/TCP is that of port "a" already`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			checkProblems(t, Resolve(test.svc, nil, &testNode), test.want...)
		})
	}
}

// External IPs that the node ignores are the one problem that its options make.
func TestProblemOfIgnoredExternalIPs(t *testing.T) {
	node := testNode
	node.IgnoreExternalIPs = true
	svc := web(func(s *Service) { s.ExternalIPs = []netip.Addr{ip("192.0.2.1"), {}, ip("2001:db8::1")} })
	checkProblems(t, Resolve(svc, nil, &node),
		"Service ns/web: spec.externalIPs[0]: 192.0.2.1 is not in use: the feature gate AllowServiceExternalIPs is off",
		"Service ns/web: spec.externalIPs[2]: 2001:db8::1 is not in use: the feature gate AllowServiceExternalIPs is off")
	checkProblems(t, Resolve(web(), nil, &node))
}

func TestProblemOfASlice(t *testing.T) {
	bad := slice("a", endpoint("10.0.2.1"), endpoint("fd00::1"), Endpoint{Ready: true})
	other := slice("b", endpoint("10.0.2.1"), endpoint("fd00::1"))
	other.Service.Name = "other"
	r := Resolve(web(dualStack), []*EndpointSlice{bad, other}, &testNode)
	checkProblems(t, r, "EndpointSlice ns/a: endpoints[1].addresses[0]: fd00::1 is not an IPv4 address")
	checkLines(t, uses(r), "10.0.2.1:8080 used")
}

// Of two ports that want one number the first has it, and the other keeps what
// is its own.
func TestCollidingPorts(t *testing.T) {
	svc := web(func(s *Service) {
		s.ExternalIPs = ips("192.0.2.1")
		s.Ports = []ServicePort{
			{Name: "http", Protocol: TCP, Port: 80, NodePort: 30080},
			{Name: "again", Protocol: TCP, Port: 80, NodePort: 30081},
			{Name: "node", Protocol: TCP, Port: 81, NodePort: 30080},
			{Name: "lost", Protocol: TCP, Port: 80, NodePort: 30080},
		}
	})
	endpoints := slice("a", endpoint("10.0.2.1"))
	endpoints.Ports = []EndpointPort{{"http", TCP, 1}, {"again", TCP, 2}, {"node", TCP, 3}, {"lost", TCP, 4}}
	r := Resolve(svc, []*EndpointSlice{endpoints}, &testNode)
	checkLines(t, lines(r),
		"10.96.0.1:80/TCP internal -> 10.0.2.1:1",
		"10.96.0.1:80/TCP external -> 10.0.2.1:1",
		"192.0.2.1:80/TCP internal -> 10.0.2.1:1",
		"192.0.2.1:80/TCP external -> 10.0.2.1:1",
		"0.0.0.0:30080/TCP internal -> 10.0.2.1:1",
		"0.0.0.0:30080/TCP external -> 10.0.2.1:1",
		"0.0.0.0:30081/TCP internal -> 10.0.2.1:2",
		"0.0.0.0:30081/TCP external -> 10.0.2.1:2",
		"10.96.0.1:81/TCP internal -> 10.0.2.1:3",
		"10.96.0.1:81/TCP external -> 10.0.2.1:3",
		"192.0.2.1:81/TCP internal -> 10.0.2.1:3",
		"192.0.2.1:81/TCP external -> 10.0.2.1:3",
	)
	checkLines(t, uses(r), "10.0.2.1:1 used", "10.0.2.1:2 used", "10.0.2.1:3 used", "10.0.2.1:4 no frontend leads to it")
}
