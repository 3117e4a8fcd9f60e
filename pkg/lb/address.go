package lb

import "net/netip"

// address is one address at which all ports of a Service can be dialled.
type address struct {
	ip     netip.Addr
	kind   Kind
	fenced bool // a load balancer's: source ranges apply, whatever the kind
}

// addresses returns what a Service has of one family, each address once: its
// ClusterIP, load balancers' and external IPs. Nothing if it has no ClusterIP
// of that family.
//
// An address that is several of these is the first of them, and guarded by the
// source ranges if one of them is a load balancer's. External IPs that the node
// ignores, and what is above its limits, are none of them.
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
	add := func(ip netip.Addr, kind Kind, fenced bool) {
		if FamilyOf(ip) != family || ip.IsUnspecified() {
			return
		}
		i, listed := index[ip]
		if !listed {
			index[ip] = len(found)
			found = append(found, address{ip: ip, kind: kind, fenced: fenced})
			return
		}
		found[i].fenced = found[i].fenced || fenced
	}
	for i, lb := range s.LoadBalancers {
		// One above the limit still restricts who may connect to the ClusterIP that it is.
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
// none. A Service without a list of families has the family of its first
// address only.
func (s *Service) clusterIP(family Family) netip.Addr {
	for i, ip := range s.ClusterIPs {
		listed := i == 0 && len(s.Families) == 0 || i < len(s.Families) && s.Families[i] == family
		if listed && FamilyOf(ip) == family && !ip.IsUnspecified() {
			return ip
		}
	}
	return netip.Addr{}
}

// unspecified returns the address that stands for all of the node's.
func unspecified(family Family) netip.Addr {
	if family == IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
