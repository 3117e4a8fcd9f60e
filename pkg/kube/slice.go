package kube

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Slice is an EndpointSlice and when it was triggered.
type Slice struct {
	lb.EndpointSlice

	// Triggered is when the change happened that the slice was written for, zero if it is
	// not known (annotation endpoints.kubernetes.io/last-change-trigger-time).
	// Network programming latency is measured from it.
	Triggered time.Time
}

// translateSlice reads an EndpointSlice with the key k. It returns false if the slice must
// be ignored: if it has names instead of addresses, or no Service.
func translateSlice(k key, obj *discoveryv1.EndpointSlice) (Slice, []lb.Problem, bool) {
	p := &parser{object: k}
	var family lb.Family
	switch obj.AddressType {
	case discoveryv1.AddressTypeIPv4:
		family = lb.IPv4
	case discoveryv1.AddressTypeIPv6:
		family = lb.IPv6
	default:
		p.add("addressType", "%q is neither IPv4 nor IPv6: the slice is ignored", obj.AddressType)
	}
	service := obj.Labels[discoveryv1.LabelServiceName]
	if service == "" {
		p.add("metadata.labels", "no %s: the slice is ignored", discoveryv1.LabelServiceName)
	}
	if family == 0 || service == "" {
		return Slice{}, p.problems, false
	}

	slice := Slice{EndpointSlice: lb.EndpointSlice{
		Name:    lb.SliceName{Namespace: k.namespace, Name: obj.Name},
		Service: lb.ServiceName{Namespace: k.namespace, Name: service},
		Family:  family,
		Ports:   p.endpointPorts(obj.Ports),
	}}
	if len(obj.Endpoints) > 0 {
		slice.Endpoints = make([]lb.Endpoint, 0, len(obj.Endpoints))
	}
	for i := range obj.Endpoints {
		if endpoint, ok := p.endpoint(i, &obj.Endpoints[i], family); ok {
			slice.Endpoints = append(slice.Endpoints, endpoint)
		}
	}
	if text, ok := obj.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		slice.Triggered, _ = time.Parse(time.RFC3339Nano, text) // zero if it cannot be parsed
	}
	return slice, p.problems, true
}

// endpointPorts returns the ports that can join with a port of a Service: those with a
// name, which may be empty, and a number.
func (p *parser) endpointPorts(ports []discoveryv1.EndpointPort) []lb.EndpointPort {
	var out []lb.EndpointPort
	for i := range ports {
		port := &ports[i]
		field := "ports[" + strconv.Itoa(i) + "]" // fmt would be slow for every port of every change
		switch {
		case port.Name == nil:
			p.add(field+".name", "missing: the port is ignored")
			continue
		case ptr.Deref(port.Port, 0) == 0:
			p.add(field+".port", "missing or zero: the port is ignored")
			continue
		}
		number := p.port(field+".port", *port.Port)
		if number == 0 {
			continue
		}
		if protocol, ok := p.protocol(field+".protocol", ptr.Deref(port.Protocol, corev1.ProtocolTCP)); ok {
			out = append(out, lb.EndpointPort{Name: *port.Name, Protocol: protocol, Port: number})
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

	if lb.IsSpecial(addr) {
		p.add(fmt.Sprintf("endpoints[%d].addresses[0]", i), "%s is unspecified, loopback, link-local, multicast or broadcast, and another destination for each client: the endpoint is ignored", addr)
		return lb.Endpoint{}, false
	}

	conditions := &endpoint.Conditions
	place := lb.Place{
		NodeName: p.endpointName(i, "nodeName", ptr.Deref(endpoint.NodeName, "")),
		Zone:     p.endpointName(i, "zone", ptr.Deref(endpoint.Zone, "")),
	}
	if hints := endpoint.Hints; hints != nil {
		for _, zone := range hints.ForZones {
			place.ForZones += lb.NamesOf(p.endpointName(i, "hints.forZones", zone.Name))
		}
		for _, node := range hints.ForNodes {
			place.ForNodes += lb.NamesOf(p.endpointName(i, "hints.forNodes", node.Name))
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

// endpointName returns the name of a node or zone that endpoint i has in a field, or none if a terminal would
// take a part of it for a command. An API server validates not all of these.
func (p *parser) endpointName(i int, field, name string) string {
	if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		p.add(fmt.Sprintf("endpoints[%d].%s", i, field), "%q cannot be a name: it is taken for none", name)
		return ""
	}
	return name
}
