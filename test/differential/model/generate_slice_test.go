package model

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-lb/sluice/test/object"
)

// owner is a Service that has endpoints: mostly one that is there.
func (g *generator) owner() objectKey {
	known := slices.SortedFunc(maps.Keys(g.have.services), objectKey.compare)
	if len(known) == 0 || g.one(6) {
		return pick(g, serviceKeys...)
	}
	return pick(g, known...)
}

// slice is a new EndpointSlice, or one that is there with something changed.
func (g *generator) slice() *discoveryv1.EndpointSlice {
	owner := g.owner()
	key := objectKey{owner.namespace, pick(g, "s1", "s2", "s3", "s4", "s5")}
	parts := []func(*discoveryv1.EndpointSlice){g.sliceLabels, g.slicePorts, g.endpoints}
	if known := g.have.slices[key]; known != nil && !g.one(6) {
		slice := known.DeepCopy()
		if len(slice.Endpoints) > 0 && !g.one(3) {
			i := g.IntN(len(slice.Endpoints))
			g.nudge(slice, i)
			return slice
		}
		pick(g, parts...)(slice)
		return slice
	}
	slice := object.Slice(key.namespace, key.name, owner.name,
		pick(g, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6))
	if svc := g.have.services[owner]; svc != nil && len(svc.Spec.IPFamilies) == 1 && !g.one(6) {
		slice.AddressType = discoveryv1.AddressType(svc.Spec.IPFamilies[0])
	}
	if g.one(20) {
		slice.AddressType = discoveryv1.AddressTypeFQDN
	}
	g.slicePorts(slice)
	g.endpoints(slice)
	if g.one(4) {
		g.sliceLabels(slice)
	}
	return slice
}

func (g *generator) sliceLabels(slice *discoveryv1.EndpointSlice) {
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: pick(g, "a", "a", "b", "c")}
	switch g.IntN(8) {
	case 0:
		delete(slice.Labels, discoveryv1.LabelServiceName)
	case 1:
		slice.Labels[discoveryv1.LabelServiceName] = ""
	case 2:
		slice.Labels[corev1.IsHeadlessService] = ""
	case 3: // not looked at here
		slice.Labels["service.kubernetes.io/service-proxy-name"] = "other"
	}
}

// slicePorts are mostly those of the slice's Service.
func (g *generator) slicePorts(slice *discoveryv1.EndpointSlice) {
	slice.Ports = nil
	specs := []portSpec{pick(g, portSpecs...), pick(g, portSpecs...)}
	owner := g.have.services[objectKey{slice.Namespace, slice.Labels[discoveryv1.LabelServiceName]}]
	if owner != nil && !g.one(8) {
		specs = nil
		for _, port := range owner.Spec.Ports {
			specs = append(specs, portSpec{name: port.Name, protocol: orTCP(port.Protocol), target: pick[int32](g, 8080, 8080, 9090)})
		}
	}
	for _, spec := range specs {
		port := object.EndpointPort(spec.name, spec.protocol, spec.target)
		switch g.IntN(25) {
		case 0:
			port.Name = nil
		case 1:
			port.Port = nil
		case 2:
			port.Port = ptr.To[int32](0)
		case 3:
			port.Protocol = nil
		case 4:
			port.Protocol = ptr.To(pick(g, corev1.ProtocolTCP, corev1.ProtocolUDP))
		case 5:
			port.Port = ptr.To[int32](9090)
		}
		slice.Ports = append(slice.Ports, port)
	}
	if g.one(25) {
		slice.Ports = nil
	}
}

// hintMode is what the hints of a slice are like. Those of a session are mostly alike:
// it takes all endpoints of a Service for hints to count.
type hintMode int

const (
	unhinted hintMode = iota
	zoneHints
	nodeHints
	anyHints
)

func (g *generator) hints() hintMode {
	if g.one(4) {
		return g.anyHintMode()
	}
	return g.mode
}

func (g *generator) anyHintMode() hintMode {
	return pick(g, unhinted, unhinted, zoneHints, nodeHints, anyHints)
}

func (g *generator) endpoints(slice *discoveryv1.EndpointSlice) {
	slice.Endpoints = nil
	hints := g.hints()
	for range 1 + g.IntN(4) {
		slice.Endpoints = append(slice.Endpoints, g.endpoint(slice.AddressType, hints))
	}
}

func (g *generator) endpoint(family discoveryv1.AddressType, hints hintMode) discoveryv1.Endpoint {
	pods := append([]string{"192.168.0.2"}, append(pods4, pods4...)...)
	if family == discoveryv1.AddressTypeIPv6 {
		pods = append([]string{"fd00:1::2"}, append(pods6, pods6...)...)
	}
	addr := pick(g, pods...)
	e := discoveryv1.Endpoint{Addresses: []string{addr}, NodeName: ptr.To("node-2"), Conditions: g.conditions()}
	if addr != pods4[2] && addr != pods6[1] {
		e.NodeName = ptr.To(nodeName)
	}
	switch g.IntN(25) {
	case 0:
		e.Addresses = nil
	case 1:
		e.Addresses = []string{pick(g, append(append([]string{}, ugly...), pods6[0], pods4[0])...)}
	case 2:
		e.Addresses = append(e.Addresses, pick(g, pods...)) // not looked at
	case 3:
		e.NodeName = nil
	case 4:
		e.NodeName = ptr.To(pick(g, "", "Node-1", nodeName, "node-2"))
	}
	g.hint(&e, hints)
	return e
}

// nudge changes one thing about an endpoint.
func (g *generator) nudge(slice *discoveryv1.EndpointSlice, i int) {
	now := &slice.Endpoints[i]
	other := g.endpoint(slice.AddressType, g.hints())
	switch g.IntN(7) {
	case 0:
		now.NodeName = pick(g, nil, ptr.To(nodeName), ptr.To("node-2"))
	case 1:
		now.Conditions.Ready = other.Conditions.Ready
	case 2:
		now.Conditions.Serving = other.Conditions.Serving
	case 3:
		now.Conditions.Terminating = other.Conditions.Terminating
	case 4, 5:
		now.Hints = other.Hints
	case 6:
		*now = other
	}
}

// conditions as the slice controller writes them, and any other.
func (g *generator) conditions() discoveryv1.EndpointConditions {
	switch g.IntN(10) {
	case 0, 1:
		return discoveryv1.EndpointConditions{}
	case 2, 3:
		return object.Conditions(true, true, false)
	case 4, 5:
		return object.Conditions(false, true, true)
	case 6:
		return object.Conditions(false, false, true)
	case 7:
		return object.Conditions(false, false, false)
	case 8:
		return object.Conditions(true, false, true) // publishNotReadyAddresses
	}
	maybe := func() *bool { return pick(g, nil, ptr.To(true), ptr.To(false)) }
	return discoveryv1.EndpointConditions{Ready: maybe(), Serving: maybe(), Terminating: maybe()}
}

func (g *generator) hint(e *discoveryv1.Endpoint, mode hintMode) {
	forZones := some(g, 2, discoveryv1.ForZone{Name: "za"}, discoveryv1.ForZone{Name: "zb"})
	forNodes := some(g, 2, discoveryv1.ForNode{Name: nodeName}, discoveryv1.ForNode{Name: "node-2"})
	switch mode {
	case zoneHints:
		e.Hints = object.Hints([]string{pick(g, "za", "za", "zb")}, nil)
	case nodeHints:
		e.Hints = object.Hints([]string{pick(g, "za", "zb")}, []string{pick(g, nodeName, nodeName, "node-2")})
	case anyHints:
		e.Hints = &discoveryv1.EndpointHints{ForZones: forZones, ForNodes: forNodes}
	}
}
