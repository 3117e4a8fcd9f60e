package lb

import (
	"fmt"
	"slices"
	"testing"
)

// A slice may change its Service, be there before it, and stay behind it.
func TestOutcomes(t *testing.T) {
	other := testNode
	other.Zone = "zb"
	moved := sliceOf("b", "a-1", endpoint("10.0.0.1"))
	for _, test := range []struct {
		name   string
		change Change
		want   string
	}{
		{"a slice of a Service is another", Change{Slices: []EndpointSlice{sliceOf("a", "a-1", endpoint("10.0.0.3"))}}, "a: 10.0.0.1:8080 -> 10.0.0.3:8080, "},
		{"a slice moves to another Service", Change{Slices: []EndpointSlice{moved}}, "a: 10.0.0.1:8080 -> reject, b: 10.0.0.2:8080 -> 10.0.0.1:8080 10.0.0.2:8080, "},
		{"a slice goes", Change{Slices: []EndpointSlice{moved}, Deleted: true}, "a: 10.0.0.1:8080 -> reject, b: 10.0.0.2:8080 -> 10.0.0.2:8080, "},
		{"a Service comes whose slice is there", Change{Services: []Service{service("early")}}, "early: none -> 10.0.0.9:8080, "},
		{"a Service goes", Change{Services: []Service{service("b")}, Deleted: true}, "b: 10.0.0.2:8080 -> none, "},
		{"one that is not there goes", Change{Services: []Service{service("c")}, Deleted: true}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := NewState(testNode)
			for _, name := range []string{"a", "b"} {
				s.SetService(service(name))
			}
			s.SetSlice(sliceOf("a", "a-1", endpoint("10.0.0.1")))
			s.SetSlice(sliceOf("b", "b-1", endpoint("10.0.0.2")))
			s.SetSlice(sliceOf("early", "early-1", endpoint("10.0.0.9")))
			got := ""
			for _, o := range test.change.Outcomes(s.Node(), slices.Collect(s.Concerned(&test.change))) {
				got += fmt.Sprintf("%s: %s -> %s, ", o.Name.Name, leads(o.Before), leads(o.After))
			}
			if got != test.want {
				t.Errorf("the outcome is %q, want %q", got, test.want)
			}
		})
	}
}

// leads returns the backends of a Service's ClusterIP.
func leads(s Snapshot) string {
	if s.Service == nil {
		return "none"
	}

	return target(s.Resolve().Frontends[0])
}

// Hints are for zones, and it is another one.
func TestOutcomesInAnotherZone(t *testing.T) {
	hinted := func(addr, zone string) Endpoint { return endpoint(addr, zones(zone)) }
	s := NewState(testNode)
	s.SetService(service("a"))
	s.SetSlice(sliceOf("a", "a-1", hinted("10.0.0.1", "za"), hinted("10.0.0.2", "zb")))
	node := testNode
	node.Zone = "zb"
	change := Change{Node: &node}
	outcomes := change.Outcomes(s.Node(), slices.Collect(s.Snapshots()))
	if len(outcomes) != 1 || leads(outcomes[0].Before) != "10.0.0.1:8080" || leads(outcomes[0].After) != "10.0.0.2:8080" {
		t.Errorf("the outcome is %v", outcomes)
	}
}
