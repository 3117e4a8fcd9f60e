package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
)

// In all tests, the agent runs on node n1 in zone za. The Service is ns/web, its one
// port 80/TCP is called http, and its backends listen on 8080.

var testNode = Node{Name: "n1", Zone: "za", PrimaryIPs: []netip.Addr{ip("192.168.0.2"), ip("2001:db8::2")}}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func ips(list ...string) []netip.Addr {
	var addrs []netip.Addr
	for _, s := range list {
		addrs = append(addrs, ip(s))
	}
	return addrs
}

func prefixes(list ...string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, s := range list {
		prefixes = append(prefixes, netip.MustParsePrefix(s))
	}
	return prefixes
}

func vips(list ...string) []LoadBalancerIP {
	var vips []LoadBalancerIP
	for _, s := range list {
		vips = append(vips, LoadBalancerIP{Addr: ip(s)})
	}
	return vips
}

// web returns the Service, changed by options.
func web(options ...func(*Service)) *Service {
	svc := &Service{
		Name:       ServiceName{"ns", "web"},
		ClusterIPs: ips("10.96.0.1"),
		Families:   []Family{IPv4},
		Ports:      []ServicePort{{Name: "http", Protocol: TCP, Port: 80}},
	}
	for _, option := range options {
		option(svc)
	}
	return svc
}

func dualStack(s *Service) {
	s.ClusterIPs = ips("10.96.0.1", "fd00::1")
	s.Families = []Family{IPv4, IPv6}
}

// balanced gives the Service a load balancer and a node port.
func balanced(s *Service) {
	s.Type = LoadBalancer
	s.LoadBalancers = vips("1.2.3.4")
	s.HealthCheckNodePort = 32000
	s.Ports[0].NodePort = 30080
}

func externalLocal(s *Service) { s.ExternalPolicy = Local }
func internalLocal(s *Service) { s.InternalPolicy = Local }

// slice returns an EndpointSlice of the Service, of its endpoints' family.
func slice(name string, endpoints ...Endpoint) *EndpointSlice {
	s := &EndpointSlice{
		Name:      SliceName{"ns", name},
		Service:   ServiceName{"ns", "web"},
		Family:    IPv4,
		Ports:     []EndpointPort{{Name: "http", Protocol: TCP, Port: 8080}},
		Endpoints: endpoints,
	}
	if len(endpoints) > 0 {
		s.Family = FamilyOf(endpoints[0].Addr)
	}
	return s
}

// endpoint returns a ready endpoint on another node, changed by options.
func endpoint(addr string, options ...func(*Endpoint)) Endpoint {
	e := Endpoint{Addr: ip(addr), Place: unique.Make(Place{NodeName: "n2"}), Ready: true, Serving: true}
	for _, option := range options {
		option(&e)
	}
	return e
}

func unready(e *Endpoint)  { e.Ready, e.Serving = false, false }
func gated(e *Endpoint)    { e.Ready = false } // serving, not terminating
func draining(e *Endpoint) { e.Ready, e.Terminating = false, true }
func stopped(e *Endpoint)  { e.Ready, e.Serving, e.Terminating = false, false, true }

// published is a terminating pod of a Service with publishNotReadyAddresses.
func published(e *Endpoint) { e.Serving, e.Terminating = false, true }

// at changes the place of an endpoint.
func at(change func(*Place)) func(*Endpoint) {
	return func(e *Endpoint) {
		place := placeOf(e.Place)
		change(&place)
		e.Place = unique.Make(place)
	}
}

func on(node string) func(*Endpoint) { return at(func(p *Place) { p.NodeName = node }) }
func here(e *Endpoint)               { on("n1")(e) }

func zones(names ...string) func(*Endpoint) {
	return at(func(p *Place) { p.ForZones = NamesOf(names...) })
}

func nodes(names ...string) func(*Endpoint) {
	return at(func(p *Place) { p.ForNodes = NamesOf(names...) })
}

// lines returns each frontend and its backends, without catch-alls.
func lines(r Resolution) []string {
	var all []string
	for _, f := range r.Frontends {
		if f.Key.Port != 0 {
			all = append(all, f.Key.String()+" -> "+target(f))
		}
	}
	return all
}

func target(f Frontend) string {
	switch {
	case len(f.Backends) == 0 && f.DropIfEmpty:
		return "drop"
	case len(f.Backends) == 0:
		return "reject"
	}
	var addrs []string
	for _, b := range f.Backends {
		addrs = append(addrs, b.Addr.String())
	}
	return strings.Join(addrs, " ")
}

// mustFrontend returns the frontend whose key is written like key.
func mustFrontend(t *testing.T, r Resolution, key string) Frontend {
	t.Helper()
	for _, f := range r.Frontends {
		if f.Key.String() == key {
			return f
		}
	}
	t.Fatalf("no frontend %s in %v", key, lines(r))
	return Frontend{}
}

// uses returns the use of each endpoint.
func uses(r Resolution) []string {
	var all []string
	for _, e := range r.Endpoints {
		all = append(all, fmt.Sprintf("%s %s", e.Addr, e.Use))
	}
	return all
}

func checkLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func checkProblems(t *testing.T, r Resolution, want ...string) {
	t.Helper()
	var got []string
	for _, p := range r.Problems {
		got = append(got, p.String())
	}
	checkLines(t, got, want...)
}

func TestWhichServicesCount(t *testing.T) {
	external := func(s *Service) { s.ExternalIPs = ips("192.0.2.1"); balanced(s) }
	for _, test := range []struct {
		name  string
		svc   *Service
		count int
	}{
		{"one with a ClusterIP", web(), 4},
		{"not a headless one", web(external, func(s *Service) { s.ClusterIPs = nil }), 0},
		{"not an ExternalName, even with a ClusterIP", web(external, func(s *Service) { s.Type = ExternalName }), 0},
		{"not one of another proxy", web(external, func(s *Service) { s.OtherProxy = true }), 0},
		{"not one whose ClusterIP is no address", web(external, func(s *Service) { s.ClusterIPs = []netip.Addr{{}} }), 0},
		{"not one without ports", web(func(s *Service) { s.Ports = nil }), 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := Resolve(test.svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &testNode)
			if len(got.Frontends) != test.count {
				t.Errorf("%d frontends, want %d: %v", len(got.Frontends), test.count, lines(got))
			}
		})
	}
}

func TestFamilies(t *testing.T) {
	everything := func(s *Service) {
		s.Type = LoadBalancer
		s.LoadBalancers = vips("1.2.3.4", "2001:db8:f::4")
		s.ExternalIPs = ips("192.0.2.1", "2001:db8:e::1")
		s.Ports[0].NodePort = 30080
	}
	onlyV4 := []string{"10.96.0.1", "1.2.3.4", "192.0.2.1", "0.0.0.0"}
	onlyV6 := []string{"fd00::1", "2001:db8:f::4", "2001:db8:e::1", "::"}
	for _, test := range []struct {
		name       string
		clusterIPs []netip.Addr
		families   []Family
		want       []string
	}{
		{"both, each with its own", ips("10.96.0.1", "fd00::1"), []Family{IPv4, IPv6}, slices.Concat(onlyV4, onlyV6)},
		{"both, IPv6 first", ips("fd00::1", "10.96.0.1"), []Family{IPv6, IPv4}, slices.Concat(onlyV4, onlyV6)},
		{"nothing of a family without ClusterIP", ips("10.96.0.1"), []Family{IPv4}, onlyV4},
		{"nothing of IPv4 in an IPv6 Service", ips("fd00::1"), []Family{IPv6}, onlyV6},
		{"that of the first address if none are listed", ips("fd00::1", "10.96.0.1"), nil, onlyV6},
		{"not one that is listed without an address", ips("10.96.0.1"), []Family{IPv4, IPv6}, onlyV4},
		{"not one that is not listed", ips("10.96.0.1", "fd00::1"), []Family{IPv4}, onlyV4},
		{"not one whose address is of the other", ips("10.96.0.1", "10.96.0.2"), []Family{IPv4, IPv6}, onlyV4},
		{"none if both are listed the other way round", ips("10.96.0.1", "fd00::1"), []Family{IPv6, IPv4}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			svc := web(everything, func(s *Service) { s.ClusterIPs, s.Families = test.clusterIPs, test.families })
			var got []string
			for _, f := range Resolve(svc, nil, &testNode).Frontends {
				if addr := f.Key.Addr.String(); f.Key.Scope == Internal && f.Key.Port != 0 {
					got = append(got, addr)
				}
			}
			checkLines(t, got, test.want...)
		})
	}
}

func TestBackendsStayInTheirFamily(t *testing.T) {
	svc := web(dualStack, func(s *Service) { s.Ports[0].NodePort = 30080 })
	got := Resolve(svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1")), slice("b", endpoint("fd00:2::1"))}, &testNode)
	checkLines(t, lines(got),
		"10.96.0.1:80/TCP internal -> 10.0.2.1:8080",
		"10.96.0.1:80/TCP external -> 10.0.2.1:8080",
		"0.0.0.0:30080/TCP internal -> 10.0.2.1:8080",
		"0.0.0.0:30080/TCP external -> 10.0.2.1:8080",
		"[fd00::1]:80/TCP internal -> [fd00:2::1]:8080",
		"[fd00::1]:80/TCP external -> [fd00:2::1]:8080",
		"[::]:30080/TCP internal -> [fd00:2::1]:8080",
		"[::]:30080/TCP external -> [fd00:2::1]:8080",
	)
}

func TestKinds(t *testing.T) {
	proxied := func(s *Service) {
		s.LoadBalancers = append(s.LoadBalancers, LoadBalancerIP{Addr: ip("1.2.3.5"), Proxy: true})
	}
	external := func(list ...string) func(*Service) { return func(s *Service) { s.ExternalIPs = ips(list...) } }
	for _, test := range []struct {
		name string
		svc  *Service
		want []string
	}{
		{"a ClusterIP", web(), []string{"10.96.0.1:80 ClusterIP"}},
		{"a node port, whatever the type", web(func(s *Service) { s.Ports[0].NodePort = 30080 }),
			[]string{"10.96.0.1:80 ClusterIP", "0.0.0.0:30080 NodePort"}},
		{"an external IP, whatever the type", web(external("192.0.2.1")),
			[]string{"10.96.0.1:80 ClusterIP", "192.0.2.1:80 ExternalIP"}},
		{"a load balancer's, whatever the type", web(func(s *Service) { s.LoadBalancers = vips("1.2.3.4") }),
			[]string{"10.96.0.1:80 ClusterIP", "1.2.3.4:80 LoadBalancer"}},
		{"not a load balancer's that proxies", web(balanced, proxied),
			[]string{"10.96.0.1:80 ClusterIP", "1.2.3.4:80 LoadBalancer", "0.0.0.0:30080 NodePort"}},
		{"a load balancer's without node port", web(balanced, func(s *Service) { s.Ports[0].NodePort = 0 }),
			[]string{"10.96.0.1:80 ClusterIP", "1.2.3.4:80 LoadBalancer"}},
		{"one of each address, however often it is listed", web(external("192.0.2.1", "192.0.2.1")),
			[]string{"10.96.0.1:80 ClusterIP", "192.0.2.1:80 ExternalIP"}},
		{"a load balancer's before an external IP", web(balanced, external("1.2.3.4")),
			[]string{"10.96.0.1:80 ClusterIP", "1.2.3.4:80 LoadBalancer", "0.0.0.0:30080 NodePort"}},
		{"a ClusterIP before anything", web(external("10.96.0.1"), func(s *Service) { s.LoadBalancers = vips("10.96.0.1") }),
			[]string{"10.96.0.1:80 ClusterIP"}},
		{"not what is no address", web(func(s *Service) { s.ExternalIPs = []netip.Addr{{}, ip("0.0.0.0")} }),
			[]string{"10.96.0.1:80 ClusterIP"}},
		{"not what is a pod's own localhost, or of its link", web(dualStack, func(s *Service) {
			s.LoadBalancers = vips("127.0.0.1", "127.1.2.3", "::1", "::", "169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1")
			s.ExternalIPs = ips("127.0.0.1", "::1")
		}), []string{"10.96.0.1:80 ClusterIP", "[fd00::1]:80 ClusterIP"}},
		{"nothing at a ClusterIP that is a pod's own localhost", web(balanced, func(s *Service) { s.ClusterIPs = ips("127.0.0.1") }), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, f := range Resolve(test.svc, nil, &testNode).Frontends {
				if f.Key.Scope == Internal && f.Key.Port != 0 {
					got = append(got, netip.AddrPortFrom(f.Key.Addr, f.Key.Port).String()+" "+f.Kind.String())
				}
			}
			checkLines(t, got, test.want...)
		})
	}
}

func TestClusterIPRefusesOtherPorts(t *testing.T) {
	svc := web(dualStack, balanced, func(s *Service) {
		s.Ports = append(s.Ports, ServicePort{Name: "dns", Protocol: UDP, Port: 53})
		s.Affinity = time.Hour
	})
	got := Resolve(svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &testNode)
	var catchAlls []string
	for _, f := range got.Frontends {
		if f.Key.Port == 0 {
			catchAlls = append(catchAlls, f.Key.String()+" "+target(f)+" "+f.Port.String())
		}
	}
	checkLines(t, catchAlls,
		"10.96.0.1:*/any internal reject ns/web", "10.96.0.1:*/any external reject ns/web",
		"[fd00::1]:*/any internal reject ns/web", "[fd00::1]:*/any external reject ns/web")
}

func TestProtocolsAreIndependent(t *testing.T) {
	svc := web(func(s *Service) {
		s.Ports = []ServicePort{
			{Name: "t", Protocol: TCP, Port: 53, NodePort: 30053},
			{Name: "u", Protocol: UDP, Port: 53, NodePort: 30053},
			{Name: "s", Protocol: SCTP, Port: 53, NodePort: 30053},
		}
	})
	endpoints := slice("a", endpoint("10.0.2.1"))
	endpoints.Ports = []EndpointPort{{"t", TCP, 1}, {"u", UDP, 2}, {"s", SCTP, 3}}
	got := Resolve(svc, []*EndpointSlice{endpoints}, &testNode)
	checkProblems(t, got)
	for _, key := range []string{"10.96.0.1:53", "0.0.0.0:30053"} {
		for protocol, want := range map[string]string{"TCP": "10.0.2.1:1", "UDP": "10.0.2.1:2", "SCTP": "10.0.2.1:3"} {
			if f := mustFrontend(t, got, key+"/"+protocol+" external"); target(f) != want {
				t.Errorf("%s leads to %s, want %s", f.Key, target(f), want)
			}
		}
	}
}

func TestEveryFrontendHasTheServicesAffinity(t *testing.T) {
	svc := web(dualStack, balanced, func(s *Service) { s.Affinity = time.Hour; s.ExternalIPs = ips("192.0.2.1") })
	for _, f := range Resolve(svc, nil, &testNode).Frontends {
		if f.Key.Port != 0 && f.Affinity != time.Hour {
			t.Errorf("%s keeps clients for %v", f.Key, f.Affinity)
		}
	}
}

func TestAlgorithms(t *testing.T) {
	for _, test := range []struct {
		name    string
		service Algorithm
		node    Algorithm
		want    Algorithm
	}{
		{"random if neither names one", DefaultAlgorithm, DefaultAlgorithm, Random},
		{"the node's", DefaultAlgorithm, Maglev, Maglev},
		{"the Service's", LeastConnections, DefaultAlgorithm, LeastConnections},
		{"the Service's, and not the node's", SourceHash, RoundRobin, SourceHash},
		{"the Service's, also if it is random", Random, NeverQueue, Random},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := testNode
			node.Algorithm = test.node
			svc := web(dualStack, balanced, func(s *Service) { s.Algorithm = test.service })
			for _, f := range Resolve(svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &node).Frontends {
				want := test.want
				if f.Key.Port == 0 {
					want = DefaultAlgorithm
				}
				if f.Algorithm != want {
					t.Errorf("%s chooses by %s, want %s", f.Key, f.Algorithm, want)
				}
			}
		})
	}
}

// All frontends of a Service that has opted out say so, but for catch-alls, which have no pool of their own.
func TestOptedOutService(t *testing.T) {
	svc := web(dualStack, balanced, func(s *Service) { s.OptedOut = true })
	for _, f := range Resolve(svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &testNode).Frontends {
		if f.OptedOut != (f.Key.Port != 0) {
			t.Errorf("%s is opted out: %v", f.Key, f.OptedOut)
		}
	}
}

// With kube-proxy's gate AllowServiceExternalIPs off, external IPs have no frontends, but
// they decide whether the external policy counts.
func TestIgnoreExternalIPs(t *testing.T) {
	node := testNode
	node.IgnoreExternalIPs = true
	both := []*EndpointSlice{slice("a", endpoint("10.0.1.1", here), endpoint("10.0.2.1"))}
	const all = "10.0.1.1:8080 10.0.2.1:8080"
	svc := web(externalLocal, func(s *Service) {
		s.ExternalIPs = ips("192.0.2.1", "1.2.3.4", "10.96.0.1")
		s.LoadBalancers = vips("1.2.3.4")
	})
	checkLines(t, lines(Resolve(svc, both, &node)),
		"10.96.0.1:80/TCP internal -> "+all,
		"10.96.0.1:80/TCP external -> "+all,
		"1.2.3.4:80/TCP internal -> "+all,
		"1.2.3.4:80/TCP external -> 10.0.1.1:8080",
	)
	svc.ExternalIPs = nil
	checkLines(t, lines(Resolve(svc, both, &node))[3:], "1.2.3.4:80/TCP external -> "+all)
}

func TestBackends(t *testing.T) {
	got := Resolve(web(), []*EndpointSlice{slice("a",
		endpoint("10.0.2.10", published),
		endpoint("10.0.2.9"),
		endpoint("10.0.1.1", here),
	)}, &testNode)
	want := []Backend{
		{Addr: netip.MustParseAddrPort("10.0.1.1:8080"), Local: true},
		{Addr: netip.MustParseAddrPort("10.0.2.9:8080")},
		{Addr: netip.MustParseAddrPort("10.0.2.10:8080"), Terminating: true},
	}
	if f := mustFrontend(t, got, "10.96.0.1:80/TCP internal"); !slices.Equal(f.Backends, want) {
		t.Errorf("backends are %v, want %v", f.Backends, want)
	}
}

func TestEqualBackendsShareMemory(t *testing.T) {
	svc := web(balanced, externalLocal)
	got := Resolve(svc, []*EndpointSlice{slice("a", endpoint("10.0.1.1", here), endpoint("10.0.1.2", here))}, &testNode)
	first := &got.Frontends[0].Backends[0]
	for _, f := range got.Frontends {
		if f.Key.Port != 0 && &f.Backends[0] != first {
			t.Errorf("%s has its own copy", f.Key)
		}
	}
}

func TestResolveLeavesItsInputAlone(t *testing.T) {
	svc := web(dualStack, balanced, externalLocal, func(s *Service) { s.SourceRanges = prefixes("203.0.113.0/24", "192.168.0.0/16") })
	endpoints := slice("a", endpoint("10.0.2.2"), endpoint("10.0.2.1"), endpoint("10.0.2.2", draining))
	before := *svc
	before.SourceRanges = slices.Clone(svc.SourceRanges)
	sliceBefore := *endpoints
	sliceBefore.Endpoints = slices.Clone(endpoints.Endpoints)
	Resolve(svc, []*EndpointSlice{endpoints}, &testNode)
	if !svc.equal(&before) || !endpoints.equal(&sliceBefore) {
		t.Error("Resolve changed its arguments")
	}
}

// masqueraded returns for each frontend with a port whether backends see this node in
// place of the client.
func masqueraded(r Resolution) []string {
	var all []string
	for _, f := range r.Frontends {
		if f.Key.Port == 0 {
			continue
		}
		sees := "client"
		if f.Masquerade {
			sees = "node"
		}
		all = append(all, f.Key.String()+" "+sees)
	}
	return all
}

func TestMasqueradeAll(t *testing.T) {
	for _, test := range []struct {
		name     string
		off      bool
		svc      *Service
		cluster  string // what backends see through the ClusterIP
		external string // and through the others, whatever the scope
	}{
		{"no client if it is off", true, web(balanced), "client", "client"},
		{"every client", false, web(balanced), "node", "node"},
		{"only ClusterIPs' clients under external Local", false, web(balanced, externalLocal), "node", "client"},
		{"every client under internal Local", false, web(balanced, internalLocal), "node", "node"},
		{"only ClusterIPs' clients under both", false, web(balanced, internalLocal, externalLocal), "node", "client"},
		{"every client under an unknown policy", false, web(balanced, func(s *Service) { s.ExternalPolicy = 7 }), "node", "node"},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := testNode
			node.MasqueradeAll = !test.off
			test.svc.ExternalIPs = ips("192.0.2.1")
			r := Resolve(test.svc, []*EndpointSlice{slice("a", endpoint("10.0.1.1", here), endpoint("10.0.2.1"))}, &node)
			checkLines(t, masqueraded(r),
				"10.96.0.1:80/TCP internal "+test.cluster,
				"10.96.0.1:80/TCP external "+test.cluster,
				"1.2.3.4:80/TCP internal "+test.external,
				"1.2.3.4:80/TCP external "+test.external,
				"192.0.2.1:80/TCP internal "+test.external,
				"192.0.2.1:80/TCP external "+test.external,
				"0.0.0.0:30080/TCP internal "+test.external,
				"0.0.0.0:30080/TCP external "+test.external,
			)
		})
	}
}

// An external policy that does not count does not keep the client's address either: that of
// a Service of type ClusterIP with a load balancer's address and no external IPs.
func TestMasqueradeAllWherePolicyDoesNotCount(t *testing.T) {
	node := testNode
	node.MasqueradeAll = true
	svc := web(externalLocal, func(s *Service) { s.LoadBalancers = vips("1.2.3.4") })
	for _, f := range Resolve(svc, nil, &node).Frontends {
		if f.Masquerade != (f.Key.Port != 0) {
			t.Errorf("%s: masqueraded is %t", f.Key, f.Masquerade)
		}
	}
}

// A load balancer's address that is a ClusterIP too is masqueraded as a ClusterIP.
func TestMasqueradeAllAtSharedAddress(t *testing.T) {
	node := testNode
	node.MasqueradeAll = true
	svc := web(balanced, externalLocal, func(s *Service) { s.LoadBalancers = vips("10.96.0.1") })
	r := Resolve(svc, nil, &node)
	for _, scope := range []string{"internal", "external"} {
		if !mustFrontend(t, r, "10.96.0.1:80/TCP "+scope).Masquerade {
			t.Errorf("not masqueraded in the %s scope", scope)
		}
	}
}

// Memory is allocated for the frontends and endpoints of the result, which may be far fewer
// than the objects list.
func TestAllocation(t *testing.T) {
	svc := web(func(s *Service) {
		for range 1000 {
			s.ExternalIPs = append(s.ExternalIPs, ip("192.0.2.1"))
		}
	})
	many := slice("a", endpoint("10.0.2.1"), endpoint("10.0.2.2"))
	for i := range 1000 {
		many.Ports = append(many.Ports, EndpointPort{Name: fmt.Sprint("p", i), Protocol: TCP, Port: 9090})
	}
	got := Resolve(svc, []*EndpointSlice{many}, &testNode)
	if len(got.Frontends) != 6 || cap(got.Frontends) > 8 {
		t.Errorf("%d frontends, room for %d", len(got.Frontends), cap(got.Frontends))
	}
	if len(got.Endpoints) != 2 || cap(got.Endpoints) > 4 {
		t.Errorf("%d endpoints, room for %d", len(got.Endpoints), cap(got.Endpoints))
	}
}
