package lb

import (
	"fmt"
	"testing"
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
	if len(r.Endpoints) != 1 || r.Endpoints[0].NodeName != want {
		t.Errorf("endpoints are %+v, want the %s alone", r.Endpoints, want)
	} else if e := r.Endpoints[0]; e.Local != (want == testNode.Name) {
		t.Errorf("endpoint on %s is local: %t", e.NodeName, e.Local)
	}
}
