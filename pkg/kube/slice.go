package kube

import (
	"fmt"
	"strconv"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// translateSlice reads an EndpointSlice with the key k. It returns false if the slice must
// be ignored: if it has names instead of addresses, or no Service.
func translateSlice(k key, obj *discoveryv1.EndpointSlice) (Slice, []lb.Problem, bool) {
	p := &parser{object: k}
	family := p.addressFamily(obj.AddressType)
	service := obj.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		p.add("metadata.labels", "no %s: the slice is ignored", discoveryv1.LabelServiceName)
	}
	if family == 0 || service == "" {
		return Slice{}, p.problems, false
	}

	namespace := p.object.namespace
	return Slice{
		EndpointSlice: lb.EndpointSlice{
			Name:      lb.SliceName{Namespace: namespace, Name: obj.Name},
			Service:   lb.ServiceName{Namespace: namespace, Name: service},
			Family:    family,
			Ports:     p.endpointPorts(obj.Ports),
			Endpoints: p.endpoints(obj.Endpoints, family),
		},
		Triggered: triggered(obj),
	}, p.problems, true
}

// addressFamily returns the family of a slice, or zero if it does not have IP addresses.
func (p *parser) addressFamily(t discoveryv1.AddressType) lb.Family {
	switch t {
	case discoveryv1.AddressTypeIPv4:
		return lb.IPv4
	case discoveryv1.AddressTypeIPv6:
		return lb.IPv6
	}
	p.add("addressType", "%q is neither IPv4 nor IPv6: the slice is ignored", t)
	return 0
}

// endpointPorts returns the ports that can join with a port of a Service: those with a
// name, which may be empty, and a number.
func (p *parser) endpointPorts(ports []discoveryv1.EndpointPort) []lb.EndpointPort {
	var out []lb.EndpointPort
	for i := range ports {
		field := "ports[" + strconv.Itoa(i) + "]" // fmt would be slow for every port of every change
		port, ok := p.endpointPort(field, &ports[i])
		if ok {
			out = append(out, port)
		}
	}
	return out
}

func (p *parser) endpointPort(field string, port *discoveryv1.EndpointPort) (lb.EndpointPort, bool) {
	if port.Name == nil {
		p.add(field+".name", "missing: the port is ignored")
		return lb.EndpointPort{}, false
	}
	if port.Port == nil || *port.Port == 0 {
		p.add(field+".port", "missing or zero: the port is ignored")
		return lb.EndpointPort{}, false
	}
	number := p.port(field+".port", *port.Port)
	if number == 0 {
		return lb.EndpointPort{}, false
	}
	protocol, ok := p.protocol(field+".protocol", ptr.Deref(port.Protocol, corev1.ProtocolTCP))
	return lb.EndpointPort{Name: *port.Name, Protocol: protocol, Port: number}, ok
}

func (p *parser) endpoints(endpoints []discoveryv1.Endpoint, family lb.Family) []lb.Endpoint {
	if len(endpoints) == 0 {
		return nil
	}
	out := make([]lb.Endpoint, 0, len(endpoints))
	for i := range endpoints {
		endpoint, ok := p.endpoint(i, &endpoints[i], family)
		if ok {
			out = append(out, endpoint)
		}
	}
	return out
}

// endpoint reads one endpoint. Only its first address counts, as in kube-proxy.
func (p *parser) endpoint(i int, endpoint *discoveryv1.Endpoint, family lb.Family) (lb.Endpoint, bool) {
	if len(endpoint.Addresses) == 0 {
		p.add(fmt.Sprintf("endpoints[%d].addresses", i), "empty: the endpoint is ignored")
		return lb.Endpoint{}, false
	}
	addr, err := lb.ParseAddr(endpoint.Addresses[0])
	if err != nil {
		p.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), "%v: the endpoint is ignored", err)
		return lb.Endpoint{}, false
	}
	if lb.FamilyOf(addr) != family {
		p.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), "%s in a slice of %s: the endpoint is ignored", addr, family)
		return lb.Endpoint{}, false
	}

	conditions := &endpoint.Conditions
	place := lb.Place{NodeName: ptr.Deref(endpoint.NodeName, ""), Zone: ptr.Deref(endpoint.Zone, "")}
	if hints := endpoint.Hints; hints != nil {
		for _, zone := range hints.ForZones {
			place.ForZones += lb.NamesOf(zone.Name)
		}
		for _, node := range hints.ForNodes {
			place.ForNodes += lb.NamesOf(node.Name)
		}
	}
	return lb.Endpoint{
		Addr:        addr,
		Place:       unique.Make(place),
		Ready:       ptr.Deref(conditions.Ready, true),
		Serving:     ptr.Deref(conditions.Serving, true),
		Terminating: ptr.Deref(conditions.Terminating, false),
	}, true
}

// triggered returns when the change happened that a slice was written for, or zero if the
// annotation is missing or cannot be parsed.
func triggered(obj *discoveryv1.EndpointSlice) time.Time {
	text, ok := obj.Annotations[corev1.EndpointsLastChangeTriggerTime]
	if !ok {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return time.Time{}
	}
	return t
}
