package lb

import (
	"testing"
	"unique"
)

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
