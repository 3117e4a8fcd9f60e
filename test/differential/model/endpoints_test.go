package model

import (
	"maps"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// endpoints are those of one service port, in all slices: CONTRACT 1.2. Where
// kube-proxy goes through slices in no order, ours is that of their names.
func (c *cluster) endpoints(sp *servicePort) []endpoint {
	all := map[netip.AddrPort]endpoint{}
	for _, key := range slices.SortedFunc(maps.Keys(c.slices), objectKey.compare) {
		slice := c.slices[key]
		if !c.isOf(slice, sp) {
			continue
		}
		for _, port := range slice.Ports {
			if !c.joins(port, sp) {
				continue
			}
			for _, e := range slice.Endpoints {
				c.addEndpoint(all, e, *port.Port, sp.family)
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b endpoint) int { return a.at.Compare(b.at) })
}

// isOf: CONTRACT 1.1.2, 1.2.1 and 1.2.2.
func (c *cluster) isOf(slice *discoveryv1.EndpointSlice, sp *servicePort) bool {
	if _, headless := slice.Labels[corev1.IsHeadlessService]; headless {
		c.note(sliceHeadless)
		return false
	}
	owner := slice.Labels[discoveryv1.LabelServiceName]
	switch {
	case slice.AddressType == discoveryv1.AddressTypeFQDN:
		c.note(sliceOfNames)
	case owner == "":
		c.note(sliceWithoutService)
	default:
		return string(slice.AddressType) == string(sp.family) && slice.Namespace == sp.service.Namespace && owner == sp.service.Name
	}
	return false
}

// joins: CONTRACT 1.1.12 and 1.2.3.
func (c *cluster) joins(port discoveryv1.EndpointPort, sp *servicePort) bool {
	protocol := corev1.ProtocolTCP
	if port.Protocol != nil {
		protocol = orTCP(*port.Protocol)
	}
	switch {
	case port.Name == nil:
		c.note(slicePortNameless)
	case port.Port == nil || !isPort(*port.Port):
		c.note(slicePortZero)
	case *port.Name == sp.name && protocol != sp.protocol:
		c.note(sliceProtocolDiffers)
	default:
		return *port.Name == sp.name
	}
	return false
}

// addEndpoint: CONTRACT 1.2.4 to 1.2.7.
func (c *cluster) addEndpoint(all map[netip.AddrPort]endpoint, e discoveryv1.Endpoint, port int32, family corev1.IPFamily) {
	if len(e.Addresses) == 0 {
		c.note(endpointWithoutAddress)
		return
	}
	ip := parse(e.Addresses[0])
	if !ip.IsValid() || familyOf(ip) != family {
		c.note(endpointBadAddress)
		return
	}
	if isSpecial(ip) {
		c.note(differsSpecialAddress)
		return
	}
	is := func(condition *bool, unset bool) bool {
		if condition == nil {
			return unset
		}
		return *condition
	}
	this := endpoint{
		at:          netip.AddrPortFrom(ip, uint16(port)),
		local:       e.NodeName != nil && *e.NodeName == nodeName,
		ready:       is(e.Conditions.Ready, true),
		serving:     is(e.Conditions.Serving, true),
		terminating: is(e.Conditions.Terminating, false),
	}
	if e.Hints != nil {
		this.forZones, this.forNodes = e.Hints.ForZones, e.Hints.ForNodes
	}
	if _, twice := all[this.at]; twice && this.terminating {
		c.note(endpointTwiceTerminating)
		return
	} else if twice {
		c.note(endpointTwiceRunning)
	}
	all[this.at] = this
}

// categorize: CONTRACT 1.3.
func (c *cluster) categorize(sp *servicePort, all []endpoint) {
	ready := func(e endpoint) bool { return e.ready }
	draining := func(e endpoint) bool { return e.serving && e.terminating }
	local := func(e endpoint) bool { return e.local }

	sp.clusterEps = c.nearby(only(all, ready))
	if len(sp.clusterEps) == 0 {
		sp.clusterEps = only(all, draining)
		c.noteIf(clusterFallback, len(sp.clusterEps) > 0)
	}
	sp.localEps = only(only(all, local), ready)
	if len(sp.localEps) == 0 {
		sp.localEps = only(only(all, local), draining)
		c.noteIf(localFallback, len(sp.localEps) > 0)
		c.noteIf(independentFallbacks, len(sp.localEps) > 0 && len(only(all, ready)) > 0)
	}
	sp.hasAny = slices.ContainsFunc(all, ready) || slices.ContainsFunc(all, draining)
	c.noteIf(neverUsed, !sp.hasAny && len(all) > 0)
}

// nearby: CONTRACT 1.4, over the ready endpoints of one service port.
func (c *cluster) nearby(ready []endpoint) []endpoint {
	hasNodes := func(e endpoint) bool { return len(e.forNodes) > 0 }
	hasZones := func(e endpoint) bool { return len(e.forZones) > 0 }
	ourNode := func(e endpoint) bool { return slices.Contains(e.forNodes, discoveryv1.ForNode{Name: nodeName}) }
	ourZone := func(e endpoint) bool {
		return c.zone() != "" && slices.Contains(e.forZones, discoveryv1.ForZone{Name: c.zone()})
	}
	every := func(is func(endpoint) bool) bool { return len(only(ready, is)) == len(ready) }
	switch {
	case every(hasNodes) && slices.ContainsFunc(ready, ourNode):
		c.note(sameNode)
		return only(ready, ourNode)
	case every(hasZones) && slices.ContainsFunc(ready, ourZone):
		c.note(sameZone)
		return only(ready, ourZone)
	}
	c.noteIf(hintsIncomplete, !every(hasZones) && slices.ContainsFunc(ready, ourZone))
	c.noteIf(hintsForOthers, len(ready) > 0 && every(hasZones))
	return ready
}

func only(endpoints []endpoint, is func(endpoint) bool) []endpoint {
	var left []endpoint
	for _, e := range endpoints {
		if is(e) {
			left = append(left, e)
		}
	}
	return left
}

// localReady: CONTRACT 1.8.12, the answer of a health check node port in one
// family.
func (c *cluster) localReady(svc *corev1.Service, family corev1.IPFamily) int {
	ips := map[netip.Addr]bool{}
	for _, sp := range c.ports {
		if sp.service != svc || sp.family != family {
			continue
		}
		for _, e := range sp.all {
			if e.local && e.ready {
				ips[e.at.Addr()] = true
			}
		}
	}
	if len(ips) == 0 {
		c.note(healthNone)
	} else {
		c.note(healthSome)
	}
	return len(ips)
}
