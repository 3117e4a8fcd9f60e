package lb

import (
	"testing"
)

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
	if e.Port != (PortName{ServiceName{"ns", "web"}, "http", TCP}) || e.NodeName != "n2" || e.Zone != "zb" || e.Local {
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
