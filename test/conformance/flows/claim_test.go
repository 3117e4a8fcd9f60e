package flows

import (
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	netutils "k8s.io/utils/net"
)

// claim is a Service port that an address and port belong to.
type claim struct {
	service  *service
	port     corev1.ServicePort
	internal bool // by its ClusterIP
	balancer bool // by the address of a load balancer
}

// claims are the Services that have the address and port that a flow dials: an address of a Service comes
// before a node port (CONTRACT.md part 0, B).
func (s *scenario) claims(f flow) []claim {
	of := familyOf(f.DestIP)
	var claims []claim
	for i := range s.Services {
		svc := &s.Services[i]
		if svc.Type == corev1.ServiceTypeExternalName || !svc.clusterIP(of).IsValid() {
			continue
		}
		c := claim{service: svc, internal: svc.clusterIP(of) == f.DestIP, balancer: svc.isBalancedAt(f.DestIP)}
		for _, port := range svc.Ports {
			isIts := c.internal || c.balancer || svc.hasExternalIP(f.DestIP)
			if isIts && uint16(port.Port) == f.DestPort && protocolOf(port.Protocol) == f.Protocol {
				c.port = port
				claims = append(claims, c)
			}
		}
	}
	if len(claims) == 0 && slices.Contains(s.Node.LocalIPs, f.DestIP) {
		if svc, port, found := s.nodePort(of, f.Protocol, f.DestPort); found {
			claims = append(claims, claim{service: svc, port: port})
		}
	}

	return claims
}

func (s *service) hasExternalIP(ip netip.Addr) bool {
	return slices.ContainsFunc(s.ExternalIPs, func(text string) bool { return parseSloppy(text) == ip })
}

func (s *service) isBalancedAt(ip netip.Addr) bool {
	return slices.ContainsFunc(s.LoadBalancerIngress, func(in corev1.LoadBalancerIngress) bool {
		return parseSloppy(in.IP) == ip && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP)
	})
}

// isExternalLocal reports whether externalTrafficPolicy is Local, and heeded
// (CONTRACT.md 1.1.9).
func (s *service) isExternalLocal() bool {
	heeded := s.Type == corev1.ServiceTypeLoadBalancer || s.Type == corev1.ServiceTypeNodePort || len(s.ExternalIPs) > 0

	return heeded && s.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// admits reports whether loadBalancerSourceRanges let a client pass that is not this
// node (CONTRACT.md 1.8.4).
func (s *service) admits(client netip.Addr) bool {
	restricted, inside := false, false
	for _, text := range s.LoadBalancerSourceRanges {
		prefix, ok := parseSloppyPrefix(text)
		if !ok || prefix.Addr().Is4() != client.Is4() {
			continue
		}
		if prefix.Bits() == 0 {
			return true
		}
		restricted = true
		inside = inside || prefix.Contains(client)
	}

	return !restricted || inside
}

func parseSloppyPrefix(text string) (netip.Prefix, bool) {
	_, ipNet, err := netutils.ParseCIDRSloppy(strings.TrimSpace(text))
	if err != nil {
		return netip.Prefix{}, false
	}
	addr, _ := netip.AddrFromSlice(ipNet.IP)
	bits, _ := ipNet.Mask.Size()

	return netip.PrefixFrom(addr.Unmap(), bits), true
}
