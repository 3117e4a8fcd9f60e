package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"unique"
)

func TestJoin(t *testing.T) {
	ports := func(s *EndpointSlice, ports ...EndpointPort) *EndpointSlice {
		s.Ports = ports
		return s
	}
	of := func(s *EndpointSlice, service string) *EndpointSlice {
		s.Service.Name = service
		return s
	}
	unnamed := web(func(s *Service) { s.Ports[0].Name = "" })
	for _, test := range []struct {
		name   string
		svc    *Service
		slices []*EndpointSlice
		want   string
	}{
		{"all slices together", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.1")), slice("b", endpoint("10.0.0.2"))},
			"10.0.0.1:8080 10.0.0.2:8080"},
		{"by name, not by number", web(),
			[]*EndpointSlice{ports(slice("a", endpoint("10.0.0.1")), EndpointPort{"other", TCP, 80}, EndpointPort{"http", TCP, 9090})},
			"10.0.0.1:9090"},
		{"by protocol too", web(),
			[]*EndpointSlice{ports(slice("a", endpoint("10.0.0.1")), EndpointPort{"http", UDP, 8080})}, "reject"},
		{"the unnamed with the unnamed", unnamed,
			[]*EndpointSlice{ports(slice("a", endpoint("10.0.0.1")), EndpointPort{"", TCP, 8080})}, "10.0.0.1:8080"},
		{"not the unnamed with a named one", unnamed, []*EndpointSlice{slice("a", endpoint("10.0.0.1"))}, "reject"},
		{"nothing of a slice without ports", web(), []*EndpointSlice{ports(slice("a", endpoint("10.0.0.1")))}, "reject"},
		{"nothing at port zero", web(),
			[]*EndpointSlice{ports(slice("a", endpoint("10.0.0.1")), EndpointPort{"http", TCP, 0})}, "reject"},
		{"nothing without slices", web(), nil, "reject"},
		{"nothing of other Services", web(), []*EndpointSlice{of(slice("a", endpoint("10.0.0.1")), "other")}, "reject"},
		{"one address once", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.1"), endpoint("10.0.0.1")), slice("b", endpoint("10.0.0.1"))},
			"10.0.0.1:8080"},
		{"one address at two ports twice", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.1")), ports(slice("b", endpoint("10.0.0.1")), EndpointPort{"http", TCP, 8081})},
			"10.0.0.1:8080 10.0.0.1:8081"},
		{"sorted as addresses, not as text", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.10"), endpoint("10.0.0.9"))}, "10.0.0.9:8080 10.0.0.10:8080"},
		{"no address of another family, and the others", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.1"), endpoint("fd00::1"))}, "10.0.0.1:8080"},
		{"nothing that is no address, and the others", web(),
			[]*EndpointSlice{slice("a", endpoint("10.0.0.1"), Endpoint{Ready: true})}, "10.0.0.1:8080"},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(test.svc, test.slices, &testNode)
			if got := target(mustFrontend(t, r, "10.96.0.1:80/TCP internal")); got != test.want {
				t.Errorf("joined %s, want %s", got, test.want)
			}
		})
	}
}

// The address of a pod can be in several slices, or in one several times. The node name
// shows which of them counts.
func TestDuplicates(t *testing.T) {
	on := func(node string, options ...func(*Endpoint)) Endpoint {
		return endpoint("10.0.0.1", append(options, on(node))...)
	}
	for _, test := range []struct {
		name          string
		first, second Endpoint
		want          string
	}{
		{"the last one", on("first"), on("second"), "second"},
		{"the last one, even if it is unready", on("first"), on("second", unready), "second"},
		{"the running one, not the old terminating one", on("first"), on("second", draining), "first"},
		{"the running one, not an older terminating one", on("first", draining), on("second"), "second"},
		{"the first of two that terminate", on("first", draining), on("second", stopped), "first"},
		{"the running one, not one published while terminating", on("first"), on("second", published), "first"},
		{"the running one elsewhere, not a terminating one here", on("other"), on("n1", draining), "other"},
		{"the running one elsewhere, not an older terminating one here", on("n1", draining), on("other"), "other"},
		{"the unready one elsewhere, not one published here while terminating", on("n1", published), on("other", unready), "other"},
		{"the running one here, not a terminating one elsewhere", on("n1"), on("other", draining), "n1"},
		{"the last one, not the one that is here", on("n1"), on("other"), "other"},
		{"the first of two that terminate, not the one that is here", on("other", draining), on("n1", draining), "other"},
	} {
		t.Run("across slices it is "+test.name, func(t *testing.T) {
			r := Resolve(web(), []*EndpointSlice{slice("a", test.first), slice("b", test.second)}, &testNode)
			checkDuplicate(t, r, test.want)
		})
		t.Run("in one slice it is "+test.name, func(t *testing.T) {
			r := Resolve(web(), []*EndpointSlice{slice("a", test.first, test.second)}, &testNode)
			checkDuplicate(t, r, test.want)
		})
	}
}

// The order of slices decides however many endpoints there are.
func TestManyDuplicates(t *testing.T) {
	first, second := slice("a"), slice("b")
	for i := range 200 {
		e := endpoint(fmt.Sprintf("10.0.0.%d", 200-i))
		first.Endpoints = append(first.Endpoints, e)
		second.Endpoints = append(second.Endpoints, endpoint(e.Addr.String(), here))
	}
	r := Resolve(web(), []*EndpointSlice{first, second}, &testNode)
	if len(r.Endpoints) != 200 {
		t.Errorf("%d endpoints, want 200", len(r.Endpoints))
	}
	for _, e := range r.Endpoints {
		if !e.Local {
			t.Fatalf("%s is that of the first slice", e.Addr)
		}
	}
}

func checkDuplicate(t *testing.T, r Resolution, want string) {
	t.Helper()
	if len(r.Endpoints) != 1 || r.Endpoints[0].Place().NodeName != want {
		t.Errorf("endpoints are %+v, want the %s alone", r.Endpoints, want)
	} else if e := r.Endpoints[0]; e.Local != (want == testNode.Name) {
		t.Errorf("endpoint on %s is local: %t", e.Place().NodeName, e.Local)
	}
}

func TestTrafficPolicies(t *testing.T) {
	both := slice("a", endpoint("10.0.1.1", here), endpoint("10.0.2.1"))
	remote := slice("a", endpoint("10.0.2.1"))
	noneReady := slice("a", endpoint("10.0.2.1", unready))
	const all = "10.0.1.1:8080 10.0.2.1:8080"
	for _, test := range []struct {
		name    string
		svc     *Service
		slice   *EndpointSlice
		cluster string // what the ClusterIP leads to, in both scopes
		inside  string // what the others lead to, from inside
		outside string // and from outside
	}{
		{"all backends under Cluster", web(balanced), both, all, all, all},
		{"remote backends under Cluster", web(balanced), remote, "10.0.2.1:8080", "10.0.2.1:8080", "10.0.2.1:8080"},
		{"refused under Cluster if none is ready", web(balanced), noneReady, "reject", "reject", "reject"},
		{"local from outside only under external Local", web(balanced, externalLocal), both, all, all, "10.0.1.1:8080"},
		{"dropped from outside only if all are elsewhere", web(balanced, externalLocal), remote, "10.0.2.1:8080", "10.0.2.1:8080", "drop"},
		{"refused under external Local if none is ready on any node", web(balanced, externalLocal), noneReady, "reject", "reject", "reject"},
		{"local at the ClusterIP only under internal Local", web(balanced, internalLocal), both, "10.0.1.1:8080", all, all},
		{"dropped at the ClusterIP only if all are elsewhere", web(balanced, internalLocal), remote, "drop", "10.0.2.1:8080", "10.0.2.1:8080"},
		{"refused under internal Local if none is ready", web(balanced, internalLocal), noneReady, "reject", "reject", "reject"},
		{"local but for the way out under both", web(balanced, internalLocal, externalLocal), both, "10.0.1.1:8080", all, "10.0.1.1:8080"},
		{"all under an unknown policy", web(balanced, func(s *Service) { s.InternalPolicy, s.ExternalPolicy = 7, 7 }), both, all, all, all},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.svc.ExternalIPs = ips("192.0.2.1")
			checkLines(t, lines(Resolve(test.svc, []*EndpointSlice{test.slice}, &testNode)),
				"10.96.0.1:80/TCP internal -> "+test.cluster,
				"10.96.0.1:80/TCP external -> "+test.cluster,
				"1.2.3.4:80/TCP internal -> "+test.inside,
				"1.2.3.4:80/TCP external -> "+test.outside,
				"192.0.2.1:80/TCP internal -> "+test.inside,
				"192.0.2.1:80/TCP external -> "+test.outside,
				"0.0.0.0:30080/TCP internal -> "+test.inside,
				"0.0.0.0:30080/TCP external -> "+test.outside,
			)
		})
	}
}

func TestExternalPolicyCounts(t *testing.T) {
	nodePort := func(s *Service) { s.Ports[0].NodePort = 30080 }
	for _, test := range []struct {
		name  string
		svc   *Service
		local bool
	}{
		{"for a load balancer", web(func(s *Service) { s.Type = LoadBalancer }), true},
		{"for a node port", web(func(s *Service) { s.Type = NodePort }), true},
		{"not for a ClusterIP", web(), false},
		{"not for a ClusterIP with a load balancer's address", web(func(s *Service) { s.LoadBalancers = vips("1.2.3.4") }), false},
		{"for a ClusterIP with external IPs", web(func(s *Service) { s.ExternalIPs = ips("192.0.2.1") }), true},
		{"for a ClusterIP with an external IP of the other family", web(func(s *Service) { s.ExternalIPs = ips("2001:db8::9") }), true},
		{"for a ClusterIP with an external IP that is none", web(func(s *Service) { s.ExternalIPs = []netip.Addr{{}} }), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodePort(test.svc)
			externalLocal(test.svc)
			want := "10.0.2.1:8080"
			if test.local {
				want = "drop"
			}
			r := Resolve(test.svc, []*EndpointSlice{slice("a", endpoint("10.0.2.1"))}, &testNode)
			if got := target(mustFrontend(t, r, "0.0.0.0:30080/TCP external")); got != want {
				t.Errorf("the node port leads to %s, want %s", got, want)
			}
		})
	}
}

func TestLocality(t *testing.T) {
	for _, test := range []struct {
		name  string
		node  string
		ep    Endpoint
		local bool
	}{
		{"our node's", "n1", endpoint("10.0.0.1", on("n1")), true},
		{"not another's", "n1", endpoint("10.0.0.1", on("n2")), false},
		{"not one that differs in case", "n1", endpoint("10.0.0.1", on("N1")), false},
		{"not that of no node", "n1", endpoint("10.0.0.1", on("")), false},
		{"not that of no node if we have no name either", "", endpoint("10.0.0.1", on("")), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(web(), []*EndpointSlice{slice("a", test.ep)}, &Node{Name: test.node})
			if r.Endpoints[0].Local != test.local || r.Frontends[0].Backends[0].Local != test.local {
				t.Errorf("local is %v, want %v", r.Endpoints[0].Local, test.local)
			}
		})
	}
}

func TestHints(t *testing.T) {
	zoneless := Node{Name: "n1"}
	for _, test := range []struct {
		name      string
		node      Node
		endpoints []Endpoint
		want      string
		unused    string // the use of those that are not chosen
	}{
		{"our zone's", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2", zones("zb")), endpoint("10.0.0.3", zones("zb", "za"))},
			"10.0.0.1:8080 10.0.0.3:8080", "other zone (topology hints)"},
		{"our node's, wherever it is", testNode,
			[]Endpoint{endpoint("10.0.0.1", here, nodes("n2")), endpoint("10.0.0.2", nodes("n1")), endpoint("10.0.0.3", nodes("n3", "n1"))},
			"10.0.0.2:8080 10.0.0.3:8080", "other node (topology hints)"},
		{"our node's before our zone's", testNode,
			[]Endpoint{endpoint("10.0.0.1", nodes("n1"), zones("zb")), endpoint("10.0.0.2", nodes("n2"), zones("za"))},
			"10.0.0.1:8080", "other node (topology hints)"},
		{"our zone's if one lacks a node", testNode,
			[]Endpoint{endpoint("10.0.0.1", nodes("n1"), zones("zb")), endpoint("10.0.0.2", zones("za"))},
			"10.0.0.2:8080", "other zone (topology hints)"},
		{"our zone's if none names our node", testNode,
			[]Endpoint{endpoint("10.0.0.1", nodes("n2"), zones("za")), endpoint("10.0.0.2", nodes("n3"), zones("zb"))},
			"10.0.0.1:8080", "other zone (topology hints)"},
		{"all if one lacks a zone", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2")},
			"10.0.0.1:8080 10.0.0.2:8080", ""},
		{"all if none names our zone", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("zb")), endpoint("10.0.0.2", zones("zc"), nodes("n2"))},
			"10.0.0.1:8080 10.0.0.2:8080", ""},
		{"all if we are in no zone", zoneless,
			[]Endpoint{endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2", zones("zb"))},
			"10.0.0.1:8080 10.0.0.2:8080", ""},
		{"all if we are in no zone and a hint names none", zoneless,
			[]Endpoint{endpoint("10.0.0.1", zones("")), endpoint("10.0.0.2", zones("zb"))},
			"10.0.0.1:8080 10.0.0.2:8080", ""},
		{"our node's although we are in no zone", zoneless,
			[]Endpoint{endpoint("10.0.0.1", nodes("n1")), endpoint("10.0.0.2", nodes("n2"))},
			"10.0.0.1:8080", "other node (topology hints)"},
		{"our zone's though an unready one has no hint", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2", draining)},
			"10.0.0.1:8080", "terminating, others are ready"},
		{"all ready ones if only an unready one names our zone", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("za"), draining), endpoint("10.0.0.2", zones("zb"))},
			"10.0.0.2:8080", "terminating, others are ready"},
		{"all that drain, whatever the hints", testNode,
			[]Endpoint{endpoint("10.0.0.1", zones("za"), draining), endpoint("10.0.0.2", zones("zb"), draining)},
			"10.0.0.1:8080 10.0.0.2:8080", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(web(balanced), []*EndpointSlice{slice("a", test.endpoints...)}, &test.node)
			checkAllLeadTo(t, r, test.want)
			for _, e := range r.Endpoints {
				if e.Use != Used && e.Use.String() != test.unused {
					t.Errorf("%s is %q, want %q", e.Addr, e.Use, test.unused)
				}
			}
		})
	}
}

func checkAllLeadTo(t *testing.T, r Resolution, want string) {
	t.Helper()
	for _, f := range r.Frontends {
		if f.Key.Port != 0 && target(f) != want {
			t.Errorf("%s leads to %s, want %s", f.Key, target(f), want)
		}
	}
}

// Hints do not count under the policy Local. They do for clients inside, which the
// external policy does not restrict.
func TestHintsAndLocalPolicy(t *testing.T) {
	endpoints := slice("a", endpoint("10.0.1.1", here, zones("zb")), endpoint("10.0.2.1", zones("za")))
	checkLines(t, lines(Resolve(web(balanced, externalLocal), []*EndpointSlice{endpoints}, &testNode)),
		"10.96.0.1:80/TCP internal -> 10.0.2.1:8080",
		"10.96.0.1:80/TCP external -> 10.0.2.1:8080",
		"1.2.3.4:80/TCP internal -> 10.0.2.1:8080",
		"1.2.3.4:80/TCP external -> 10.0.1.1:8080",
		"0.0.0.0:30080/TCP internal -> 10.0.2.1:8080",
		"0.0.0.0:30080/TCP external -> 10.0.1.1:8080",
	)
}

// Hints count port by port: an endpoint without hints at one port does not
// make those of another port void.
func TestHintsPerPort(t *testing.T) {
	svc := web(func(s *Service) { s.Ports = append(s.Ports, ServicePort{Name: "admin", Protocol: TCP, Port: 81}) })
	hinted := slice("a", endpoint("10.0.0.1", zones("za")), endpoint("10.0.0.2", zones("zb")))
	hinted.Ports = append(hinted.Ports, EndpointPort{"admin", TCP, 8081})
	plain := slice("b", endpoint("10.0.0.3"))
	plain.Ports[0] = EndpointPort{"admin", TCP, 8081}
	r := Resolve(svc, []*EndpointSlice{hinted, plain}, &testNode)
	checkLines(t, lines(r),
		"10.96.0.1:80/TCP internal -> 10.0.0.1:8080",
		"10.96.0.1:80/TCP external -> 10.0.0.1:8080",
		"10.96.0.1:81/TCP internal -> 10.0.0.1:8081 10.0.0.2:8081 10.0.0.3:8081",
		"10.96.0.1:81/TCP external -> 10.0.0.1:8081 10.0.0.2:8081 10.0.0.3:8081",
	)
}

func TestNames(t *testing.T) {
	for _, test := range []struct {
		names Names
		name  string
		has   bool
	}{
		{NamesOf(), "", false},
		{NamesOf(""), "", true},
		{NamesOf("za"), "za", true},
		{NamesOf("za"), "z", false},
		{NamesOf("za"), "", false},
		{NamesOf("za", "zb"), "zb", true},
		{NamesOf("za", "zb"), "a", false},
	} {
		if has := test.names.has(test.name); has != test.has {
			t.Errorf("%q has %q: %t", test.names, test.name, has)
		}
	}
}

func TestEndpointWithoutPlace(t *testing.T) {
	e := endpoint("10.0.0.1")
	e.Place = unique.Handle[Place]{}
	r := Resolve(web(balanced), []*EndpointSlice{slice("a", e, endpoint("10.0.0.2", zones("za")))}, &testNode)
	checkAllLeadTo(t, r, "10.0.0.1:8080 10.0.0.2:8080")
}

// Which endpoints new flows choose under each policy, and the use of each endpoint of
// a Service whose frontends have both.
func TestEligibility(t *testing.T) {
	for _, test := range []struct {
		name      string
		endpoints []Endpoint
		cluster   string
		local     string
		uses      []string
	}{
		{"ready ones",
			[]Endpoint{endpoint("10.0.1.1", here), endpoint("10.0.2.1")},
			"10.0.1.1:8080 10.0.2.1:8080", "10.0.1.1:8080",
			[]string{"10.0.1.1:8080 used", "10.0.2.1:8080 used"}},
		{"none at all", nil, "reject", "reject", nil},
		{"not the unready",
			[]Endpoint{endpoint("10.0.1.1", here, unready), endpoint("10.0.2.1")},
			"10.0.2.1:8080", "drop",
			[]string{"10.0.1.1:8080 not ready", "10.0.2.1:8080 used"}},
		{"never the unready that serve but do not terminate",
			[]Endpoint{endpoint("10.0.1.1", here, gated)},
			"reject", "reject",
			[]string{"10.0.1.1:8080 not ready"}},
		{"not the draining while others are ready",
			[]Endpoint{endpoint("10.0.1.1", here), endpoint("10.0.1.2", here, draining), endpoint("10.0.2.1", draining)},
			"10.0.1.1:8080", "10.0.1.1:8080",
			[]string{"10.0.1.1:8080 used", "10.0.1.2:8080 terminating, others are ready", "10.0.2.1:8080 terminating, others are ready"}},
		{"all that drain if none is ready",
			[]Endpoint{endpoint("10.0.1.1", here, draining), endpoint("10.0.2.1", draining), endpoint("10.0.2.2", unready)},
			"10.0.1.1:8080 10.0.2.1:8080", "10.0.1.1:8080",
			[]string{"10.0.1.1:8080 used", "10.0.2.1:8080 used", "10.0.2.2:8080 not ready"}},
		{"the local that drain although a remote one is ready",
			[]Endpoint{endpoint("10.0.1.1", here, draining), endpoint("10.0.2.1")},
			"10.0.2.1:8080", "10.0.1.1:8080",
			[]string{"10.0.1.1:8080 used", "10.0.2.1:8080 used"}},
		{"remote ones that drain, none local",
			[]Endpoint{endpoint("10.0.1.1", here, stopped), endpoint("10.0.2.1", draining)},
			"10.0.2.1:8080", "drop",
			[]string{"10.0.1.1:8080 terminating and not serving", "10.0.2.1:8080 used"}},
		{"never the stopped",
			[]Endpoint{endpoint("10.0.1.1", here, stopped), endpoint("10.0.2.1", stopped)},
			"reject", "reject",
			[]string{"10.0.1.1:8080 terminating and not serving", "10.0.2.1:8080 terminating and not serving"}},
		{"those published as ready, which keep the draining away",
			[]Endpoint{endpoint("10.0.1.1", here, published), endpoint("10.0.2.1", draining)},
			"10.0.1.1:8080", "10.0.1.1:8080",
			[]string{"10.0.1.1:8080 used", "10.0.2.1:8080 terminating, others are ready"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := Resolve(web(balanced, externalLocal), []*EndpointSlice{slice("a", test.endpoints...)}, &testNode)
			if got := target(mustFrontend(t, r, "10.96.0.1:80/TCP internal")); got != test.cluster {
				t.Errorf("Cluster leads to %s, want %s", got, test.cluster)
			}
			if got := target(mustFrontend(t, r, "1.2.3.4:80/TCP external")); got != test.local {
				t.Errorf("Local leads to %s, want %s", got, test.local)
			}
			checkLines(t, uses(r), test.uses...)
			for _, f := range r.Frontends {
				for _, e := range r.Endpoints {
					chosen := slices.ContainsFunc(f.Backends, func(b Backend) bool { return b.Addr == e.Addr })
					if f.Key.Port != 0 && chosen != (e.Uses[f.Policy] == Used) {
						t.Errorf("%s has %s: %t, and its use with policy %s is %q", f.Key, e.Addr, chosen, f.Policy, e.Uses[f.Policy])
					}
				}
			}
		})
	}
}

// The remote endpoints of a Service that only uses local ones are NotLocal.
func TestUseOfLocalOnly(t *testing.T) {
	for _, test := range []struct {
		name string
		ep   Endpoint
		use  Use
	}{
		{"used here", endpoint("10.0.1.2", here), Used},
		{"not local elsewhere", endpoint("10.0.2.1"), NotLocal},
		{"not local elsewhere, draining", endpoint("10.0.2.1", draining), NotLocal},
		{"not ready elsewhere", endpoint("10.0.2.1", unready), NotReady},
		{"superseded here", endpoint("10.0.1.2", here, draining), Superseded},
		{"not local, whatever the hints", endpoint("10.0.2.1", zones("zb")), NotLocal},
		{"used here, whatever the hints", endpoint("10.0.1.2", here, zones("zb")), Used},
	} {
		t.Run(test.name, func(t *testing.T) {
			slices := []*EndpointSlice{slice("a", endpoint("10.0.1.1", here, zones("za")), test.ep)}
			r := Resolve(web(internalLocal), slices, &testNode)
			if got := r.Endpoints[1].Use; got != test.use {
				t.Errorf("use is %q, want %q", got, test.use)
			}
		})
	}
}

func TestUseWithoutFrontend(t *testing.T) {
	r := Resolve(web(), []*EndpointSlice{slice("a", endpoint("10.0.2.1")), slice("b", endpoint("fd00:2::1"))}, &testNode)
	checkLines(t, uses(r), "10.0.2.1:8080 used", "[fd00:2::1]:8080 no frontend leads to it")
}

func TestEndpointStates(t *testing.T) {
	inZone := at(func(p *Place) { p.Zone = "zb" })
	r := Resolve(web(), []*EndpointSlice{slice("a",
		endpoint("10.0.1.1", here, draining),
		endpoint("10.0.2.1", inZone),
		endpoint("10.0.2.2", unready),
		endpoint("10.0.2.3", published),
		endpoint("10.0.2.4", gated),
	)}, &testNode)
	alive := []bool{true, true, false, true, true}
	ready := []bool{false, true, false, true, false}
	for i, e := range r.Endpoints {
		if e.Alive != alive[i] || e.Ready != ready[i] {
			t.Errorf("%s is alive %v and ready %v, want %v and %v", e.Addr, e.Alive, e.Ready, alive[i], ready[i])
		}
	}
	e := r.Endpoints[1]
	if *e.Port != (PortName{ServiceName{"ns", "web"}, "http", TCP}) || e.Place().NodeName != "n2" || e.Place().Zone != "zb" || e.Local {
		t.Errorf("wrong state of %s: %+v", e.Addr, e)
	}
}

func TestLocalReady(t *testing.T) {
	svc := web(dualStack, func(s *Service) { s.Ports = append(s.Ports, ServicePort{Name: "admin", Protocol: TCP, Port: 81}) })
	v4 := slice("a", endpoint("10.0.1.1", here), endpoint("10.0.1.2", here), endpoint("10.0.1.3", here, draining),
		endpoint("10.0.1.4", here, published), endpoint("10.0.2.1"))
	v4.Ports = append(v4.Ports, EndpointPort{"admin", TCP, 8081})
	r := Resolve(svc, []*EndpointSlice{v4, slice("b", endpoint("fd00:1::1", here))}, &testNode)
	if got := r.LocalReady(IPv4); got != 3 {
		t.Errorf("%d addresses are ready in IPv4, want 3", got)
	}
	if got := r.LocalReady(IPv6); got != 1 {
		t.Errorf("%d addresses are ready in IPv6, want 1", got)
	}
}
