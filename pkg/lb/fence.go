package lb

import (
	"net/netip"
	"slices"
)

// fence is who may connect to a Service's load balancers in one family. No
// ranges: everybody.
type fence struct {
	ranges     []netip.Prefix
	nodeInside bool
	shut       bool // there are too many ranges: nobody may
}

// fence returns who may connect to the load balancers of one family.
func (r *resolver) fence(family Family) fence {
	if r.overRanges && r.countSourceRanges(family) > 0 {
		return fence{shut: true}
	}
	return r.svc.fence(family, r.node)
}

// fence returns the source ranges of one family. They fail open as kube-proxy's
// do: with a range for everybody among them, or none of the family, nobody is
// kept out.
func (s *Service) fence(family Family, node *Node) fence {
	var f fence
	for _, p := range s.SourceRanges {
		if FamilyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			return fence{}
		}
		f.ranges = append(f.ranges, p.Masked())
	}
	nodeIP := node.primaryIP(family)
	f.nodeInside = slices.ContainsFunc(f.ranges, func(p netip.Prefix) bool { return p.Contains(nodeIP) })
	if f.nodeInside {
		f.ranges = append(f.ranges, s.ownPrefixes(family)...)
	}
	slices.SortFunc(f.ranges, netip.Prefix.Compare)
	f.ranges = slices.Compact(f.ranges)
	return f
}

// ownPrefixes returns the addresses of the Service's load balancers. Where one
// is bound to the node, a connection from the node to it has it as source too.
func (s *Service) ownPrefixes(family Family) []netip.Prefix {
	var own []netip.Prefix
	for _, lb := range s.LoadBalancers {
		if !lb.Proxy && FamilyOf(lb.Addr) == family {
			own = append(own, netip.PrefixFrom(lb.Addr, lb.Addr.BitLen()))
		}
	}
	return own
}

// primaryIP returns the node IP of a family, the loopback address if it is not
// known.
func (n *Node) primaryIP(family Family) netip.Addr {
	for _, ip := range n.PrimaryIPs {
		if FamilyOf(ip) == family {
			return ip
		}
	}
	if family == IPv4 {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return netip.IPv6Loopback()
}
