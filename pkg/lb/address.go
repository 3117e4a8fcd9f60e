package lb

import "net/netip"

// address is one address at which clients reach all ports of a Service.
type address struct {
	ip         netip.Addr
	kind       Kind
	restricted bool // it is a load balancer's, so source ranges apply, whatever the kind
}

// addresses returns the addresses of the Service in one family, each once: its
// ClusterIP, its load balancers' addresses and its external IPs. It returns none if the
// Service has no ClusterIP of that family.
//
// An address that is several of these has the kind of the first, and source ranges
// apply to it if one of them is a load balancer's. External IPs that the node
// ignores and addresses above its limits are left out.
func (r *resolver) addresses(family Family) []address {
	s := r.svc
	clusterIP := s.clusterIP(family)
	if !clusterIP.IsValid() {
		return nil
	}
	found := make([]address, 1, 1+r.loadBalancers+len(r.externalIPs))
	found[0] = address{ip: clusterIP, kind: KindClusterIP}
	index := make(map[netip.Addr]int) // of found
	index[clusterIP] = 0
	add := func(ip netip.Addr, kind Kind, restricted bool) {
		if FamilyOf(ip) != family || ip.IsUnspecified() {
			return
		}
		i, listed := index[ip]
		if !listed {
			index[ip] = len(found)
			found = append(found, address{ip: ip, kind: kind, restricted: restricted})
			return
		}
		found[i].restricted = found[i].restricted || restricted
	}
	for i, lb := range s.LoadBalancers {
		// Source ranges apply to a ClusterIP that is a load balancer's address too, even above the limit.
		if _, listed := index[lb.Addr]; !lb.Proxy && (listed || i < r.loadBalancers) {
			add(lb.Addr, KindLoadBalancer, true)
		}
	}
	for _, ip := range r.externalIPs {
		add(ip, KindExternalIP, false)
	}
	return found
}

// clusterIP returns the ClusterIP of one family, the zero Addr if there is
// none. A Service that lists no families has that of its first address only.
func (s *Service) clusterIP(family Family) netip.Addr {
	for i, ip := range s.ClusterIPs {
		listed := i == 0 && len(s.Families) == 0 || i < len(s.Families) && s.Families[i] == family
		if listed && FamilyOf(ip) == family && !ip.IsUnspecified() {
			return ip
		}
	}
	return netip.Addr{}
}

// unspecified returns the address that stands for all addresses of the node.
func unspecified(family Family) netip.Addr {
	if family == IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
