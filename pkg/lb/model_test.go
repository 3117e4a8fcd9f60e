package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
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
		place := e.place()
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
