package lb

import (
	"net/netip"
	"slices"
)

// sourceRanges are the addresses from which clients may connect to a Service's load
// balancers in one family. Without ranges, every client may.
type sourceRanges struct {
	ranges     []netip.Prefix
	nodeInside bool
	overLimit  bool // there are too many ranges: no client may connect
}

// sourceRanges returns the source ranges of one family, within the node's limits.
func (r *resolver) sourceRanges(family Family) sourceRanges {
	if r.overRanges && r.countSourceRanges(family) > 0 {
		return sourceRanges{overLimit: true}
	}
	return r.svc.sourceRanges(family, r.node)
}

// sourceRanges returns the source ranges of one family. They fail open as kube-proxy's
// do: if one of them contains all addresses, or none is of the family, every client may
// connect.
func (s *Service) sourceRanges(family Family, node *Node) sourceRanges {
	var f sourceRanges
	for _, p := range s.SourceRanges {
		if FamilyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			return sourceRanges{}
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

// ownPrefixes returns the addresses of the Service's load balancers. If one of them is
// bound to the node, connections from the node to it have it as their source, too.
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
