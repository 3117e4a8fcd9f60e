package flows

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	netutils "k8s.io/utils/net"
)

// What follows from a scenario's objects by CONTRACT.md: for what a fixture lacks
// because kube-proxy behaves differently.

// nodePort returns the Service port that a node port of this family leads to,
// or false if there is none.
func (s *scenario) nodePort(of family, protocol corev1.Protocol, number uint16) (*service, corev1.ServicePort, bool) {
	for i := range s.Services {
		svc := &s.Services[i]
		if svc.Type == corev1.ServiceTypeExternalName || !svc.clusterIP(of).IsValid() {
			continue
		}
		for _, port := range svc.Ports {
			if port.NodePort != 0 && uint16(port.NodePort) == number && protocolOf(port.Protocol) == protocol {
				return svc, port, true
			}
		}
	}

	return nil, corev1.ServicePort{}, false
}

// clusterIP is the Service's address of a family, zero if the Service does not
// exist there (CONTRACT.md 1.1.4).
func (s *service) clusterIP(of family) netip.Addr {
	if len(s.IPFamilies) == 0 {
		if ip := parseSloppy(s.ClusterIP); ip.IsValid() && ip.Is4() == (of == corev1.IPv4Protocol) {
			return ip
		}

		return netip.Addr{}
	}
	if i := slices.Index(s.IPFamilies, of); i >= 0 && i < len(s.ClusterIPs) {
		return parseSloppy(s.ClusterIPs[i])
	}

	return netip.Addr{}
}

// clusterBackends are those of a Service port that traffic without a Local
// policy may reach from this node, sorted (CONTRACT.md 1.2, 1.3.1, 1.4).
func (s *scenario) clusterBackends(svc *service, port corev1.ServicePort, of family) []string {
	known := s.endpoints(svc, port, of)
	if ready := where(known, isReady); len(ready) > 0 {
		return targetsOf(s.Node.prefer(ready))
	}

	return targetsOf(where(known, isLastResort))
}

// localBackends are those that traffic with a Local policy may reach
// (CONTRACT.md 1.3.2).
func (s *scenario) localBackends(svc *service, port corev1.ServicePort, of family) []string {
	local := where(s.endpoints(svc, port, of), s.Node.runs)
	if ready := where(local, isReady); len(ready) > 0 {
		return targetsOf(ready)
	}

	return targetsOf(where(local, isLastResort))
}

func isReady(e endpoint) bool { return isTrue(e.Ready, true) }

// isLastResort is true for what still serves while it terminates.
func isLastResort(e endpoint) bool { return isTrue(e.Serving, true) && isTrue(e.Terminating, false) }

func targetsOf(endpoints map[string]endpoint) []string {
	return slices.Sorted(maps.Keys(endpoints))
}

// endpoints are those of a Service port, by where they answer, each once
// (CONTRACT.md 1.2.7): one that is not terminating replaces any other, whatever node
// either is on, and a terminating one replaces none. Where kube-proxy goes through
// slices in no order, Sluice's is that of their names.
func (s *scenario) endpoints(svc *service, port corev1.ServicePort, of family) map[string]endpoint {
	inOrder := slices.SortedStableFunc(slices.Values(s.EndpointSlices), func(a, b slice) int { return strings.Compare(a.Name, b.Name) })
	known := map[string]endpoint{}
	for _, es := range inOrder {
		if es.Service != svc.Namespace+"/"+svc.Name || es.AddressType != discoveryv1.AddressType(of) {
			continue
		}
		for _, ep := range es.Endpoints {
			for _, target := range es.at(ep, port) {
				if _, twice := known[target]; !twice || !isTrue(ep.Terminating, false) {
					known[target] = ep
				}
			}
		}
	}

	return known
}

// isLocalTarget reports whether a target of a flow is on this node, to the Service
// port that the flow dials. Where no Service port has it, the address decides.
func (s *scenario) isLocalTarget(f flow, target netip.AddrPort) bool {
	for _, c := range s.claims(f) {
		if e, found := s.endpoints(c.service, c.port, familyOf(f.DestIP))[target.String()]; found {
			return s.Node.runs(e)
		}
	}

	return s.isLocalEndpoint(target.Addr())
}

// at is where an endpoint answers for a Service port.
func (s slice) at(e endpoint, port corev1.ServicePort) []string {
	var targets []string
	for _, p := range s.Ports {
		if p.Name == nil || p.Port == nil || *p.Port == 0 || len(e.Addresses) == 0 {
			continue
		}
		protocol := corev1.ProtocolTCP
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		if ip := parseSloppy(e.Addresses[0]); ip.IsValid() && *p.Name == port.Name && protocol == protocolOf(port.Protocol) {
			targets = append(targets, netip.AddrPortFrom(ip, uint16(*p.Port)).String())
		}
	}

	return targets
}

// prefer leaves the endpoints that are hinted for this node, or else for its
// zone, if all of them have such a hint.
func (n *node) prefer(ready map[string]endpoint) map[string]endpoint {
	modes := []func(endpoint) (hints []string, wanted string){
		func(e endpoint) ([]string, string) { return e.ForNodes, n.Name },
		func(e endpoint) ([]string, string) {
			if n.Zone == nil {
				return e.ForZones, ""
			}
			return e.ForZones, *n.Zone
		},
	}
	for _, mode := range modes {
		unhinted := where(ready, func(e endpoint) bool { hints, _ := mode(e); return len(hints) == 0 })
		ours := where(ready, func(e endpoint) bool {
			hints, wanted := mode(e)
			return wanted != "" && slices.Contains(hints, wanted)
		})
		if len(unhinted) == 0 && len(ours) > 0 {
			return ours
		}
	}

	return ready
}

func where(all map[string]endpoint, is func(endpoint) bool) map[string]endpoint {
	some := map[string]endpoint{}
	for target, e := range all {
		if is(e) {
			some[target] = e
		}
	}

	return some
}

// targets are all places that any endpoint of the scenario could be meant to
// answer at, used or not.
func (s *scenario) targets() []netip.AddrPort {
	var all []netip.AddrPort
	for _, es := range s.EndpointSlices {
		for _, e := range es.Endpoints {
			for _, address := range e.Addresses {
				for _, p := range es.Ports {
					if ip := parseSloppy(address); ip.IsValid() && p.Port != nil && *p.Port != 0 {
						all = append(all, netip.AddrPortFrom(ip, uint16(*p.Port)))
					}
				}
			}
		}
	}
	for _, f := range s.Flows {
		for _, text := range f.Output {
			if target, err := netip.ParseAddrPort(text); err == nil {
				all = append(all, target)
			}
		}
	}

	return all
}

func parseSloppy(text string) netip.Addr {
	addr, _ := netip.AddrFromSlice(netutils.ParseIPSloppy(text))

	return addr.Unmap()
}

func protocolOf(p corev1.Protocol) corev1.Protocol {
	if p == "" {
		return corev1.ProtocolTCP
	}

	return p
}

func isTrue(condition *bool, otherwise bool) bool {
	if condition == nil {
		return otherwise
	}

	return *condition
}

func familyOf(ip netip.Addr) family {
	if ip.Is4() {
		return corev1.IPv4Protocol
	}

	return corev1.IPv6Protocol
}
