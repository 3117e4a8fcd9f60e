package objects

import (
	"net/netip"
	"testing"
)

var places = Plan{
	Local:  Place{Node: "node-1", Address: netip.MustParseAddr("192.168.50.1"), Pod: netip.MustParseAddr("10.244.1.3")},
	Remote: Place{Node: "node-2", Address: netip.MustParseAddr("192.168.50.2"), Pod: netip.MustParseAddr("10.244.2.2")},
}

// planOf is a plan with the usual places.
func planOf(services, endpoints int) Plan {
	p := places
	p.Services, p.Endpoints = services, endpoints

	return p
}

// In the largest plan, every address is in its range and belongs to one only.
func TestAddresses(t *testing.T) {
	p := planOf(100_000, 10)
	if err := p.Fits(); err != nil {
		t.Fatal(err)
	}
	services := netip.MustParsePrefix(ServiceRange)
	clusterIPs := map[netip.Addr]bool{BulkIP: true, NearIP: true, FarIP: true, SingleIP: true}
	endpoints := make(map[netip.Addr]bool, p.Services*p.Endpoints)
	mustBeNew := func(seen map[netip.Addr]bool, address netip.Addr, prefix netip.Prefix) {
		if seen[address] || !prefix.Contains(address) {
			t.Fatalf("%v is in use already (%t), or not in %v", address, seen[address], prefix)
		}
		seen[address] = true
	}
	for i := range p.Services {
		mustBeNew(clusterIPs, p.ClusterIP(i), services)
		for e := range p.Endpoints {
			mustBeNew(endpoints, p.EndpointAddress(i, e, 0), []netip.Prefix{LocalPrefix, RemotePrefix}[e%2])
		}
		for generation := 1; generation <= 4; generation++ {
			mustBeNew(endpoints, p.EndpointAddress(i, 0, generation), LocalPrefix)
		}
		if p.EndpointAddress(i, 1, 4) != p.EndpointAddress(i, 1, 0) {
			t.Fatalf("endpoint 1 of Service %d changes", i)
		}
	}
	for generation := range 1 << 16 {
		mustBeNew(endpoints, p.SingleAddress(generation), LocalPrefix)
	}
}

// A plan that does not fit is refused.
func TestFits(t *testing.T) {
	for name, wrong := range map[string]Plan{
		"too many addresses": planOf(100_000, 12),
		"no endpoints":       planOf(1, 0),
		"large slices":       planOf(1, 1001),
	} {
		if wrong.Fits() == nil {
			t.Errorf("%s: a plan fits that does not: %+v", name, wrong)
		}
	}
}

// The objects are those of the plan.
func TestObjects(t *testing.T) {
	p := planOf(1000, 3)
	for _, test := range []struct {
		service int
		ports   int
	}{{0, 2}, {1, 1}, {998, 1}, {999, 2}} {
		service, slice := p.Service(test.service), p.Slice(test.service, 7)
		if len(service.Spec.Ports) != test.ports || len(slice.Ports) != test.ports {
			t.Errorf("Service %d has %d ports, its slice %d, want %d",
				test.service, len(service.Spec.Ports), len(slice.Ports), test.ports)
		}
		var addresses, nodes []string
		for _, endpoint := range slice.Endpoints {
			addresses = append(addresses, endpoint.Addresses...)
			nodes = append(nodes, *endpoint.NodeName)
		}
		want := []string{"node-1", "node-2", "node-1"}
		for e := range want {
			if nodes[e] != want[e] || addresses[e] != p.EndpointAddress(test.service, e, 7).String() {
				t.Errorf("endpoint %d of Service %d is %s on %s", e, test.service, addresses[e], nodes[e])
			}
		}
	}
}
