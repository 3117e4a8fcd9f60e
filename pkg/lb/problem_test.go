package lb

import (
	"net/netip"
	"testing"
)

func TestProblems(t *testing.T) {
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
		{"an address that is everywhere", web(func(s *Service) { s.ExternalIPs = ips("0.0.0.0") }),
			[]string{"Service ns/web: spec.externalIPs[0]: 0.0.0.0 is not an address of one destination"}},
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
