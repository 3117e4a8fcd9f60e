// Package heavy makes Services as large as an object can be, for tests.
package heavy

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Service is a Service, with its slices.
type Service struct {
	lb.Service
	Slices []lb.EndpointSlice
}

// New returns a Service of one load balancer with so many of each. Endpoints come in slices of
// 1,000, which is what the API allows.
func New(ports, ranges, externalIPs, endpoints int) *Service {
	h := &Service{Service: lb.Service{
		Name:          lb.ServiceName{Namespace: "ns", Name: "heavy"},
		Type:          lb.LoadBalancer,
		ClusterIPs:    []netip.Addr{netip.MustParseAddr("10.96.7.7")},
		Families:      []lb.Family{lb.IPv4},
		LoadBalancers: []lb.LoadBalancerIP{{Addr: netip.MustParseAddr("192.0.2.7")}},
	}}
	number := func(net byte, i int) netip.Addr {
		var addr [4]byte
		binary.BigEndian.PutUint32(addr[:], uint32(net)<<24|uint32(i))

		return netip.AddrFrom4(addr)
	}
	var slicePorts []lb.EndpointPort
	for i := range ports {
		name := fmt.Sprint("port-", i)
		h.Ports = append(h.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(1 + i)})
		slicePorts = append(slicePorts, lb.EndpointPort{Name: name, Protocol: lb.TCP, Port: uint16(1 + i)})
	}
	for i := range ranges {
		h.SourceRanges = append(h.SourceRanges, netip.PrefixFrom(number(100, 256*i), 24))
	}
	for i := range externalIPs {
		h.ExternalIPs = append(h.ExternalIPs, number(20, i))
	}
	for i := range endpoints {
		if i%1000 == 0 {
			h.Slices = append(h.Slices, lb.EndpointSlice{
				Name:    lb.SliceName{Namespace: "ns", Name: fmt.Sprintf("heavy-%05d", i)},
				Service: h.Name, Family: lb.IPv4, Ports: slicePorts,
			})
		}
		last := &h.Slices[len(h.Slices)-1]
		last.Endpoints = append(last.Endpoints, lb.Endpoint{Addr: number(10, 2*i), Ready: true, Serving: true})
	}

	return h
}
