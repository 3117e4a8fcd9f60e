package lb

import (
	"errors"
	"fmt"
	"net/netip"
)

// NodePortAddresses are the ranges of the node's addresses that answer on node ports. Of a
// family without a range, all addresses answer.
//
// The zero value, kube-proxy's default in nftables mode, means "primary": the
// node's primary IPs are the ranges. (The default of its iptables mode is
// 0.0.0.0/0 and ::/0.)
type NodePortAddresses struct {
	Prefixes []netip.Prefix
}

// ParseNodePortAddresses parses the list of kube-proxy's nodePortAddresses:
// address ranges, or the word "primary" alone. An empty list is "primary" too.
// The error names the bad element.
func ParseNodePortAddresses(list []string) (NodePortAddresses, error) {
	var n NodePortAddresses
	if len(list) == 1 && list[0] == "primary" {
		return n, nil
	}
	for i, s := range list {
		prefix, err := ParsePrefix(s)
		if s == "primary" {
			err = errors.New(`"primary" stands alone`)
		}
		if err != nil {
			return NodePortAddresses{}, fmt.Errorf("nodePortAddresses[%d]: %w", i, err)
		}
		n.Prefixes = append(n.Prefixes, prefix)
	}
	return n, nil
}

// Select returns the addresses of local, the node's own, that answer on node
// ports, in their order. Loopback addresses never do; sockets of the node that
// connect to one are treated elsewhere.
func (n NodePortAddresses) Select(local []netip.Addr, node *Node) []netip.Addr {
	var selected []netip.Addr
	for _, addr := range local {
		if !addr.IsLoopback() && n.contains(addr, node) {
			selected = append(selected, addr)
		}
	}
	return selected
}

// All reports whether every address of a family is selected, now and later, its loopback
// address included. Then the unspecified address stands for them.
func (n NodePortAddresses) All(family Family, node *Node) bool {
	restricted := false
	for _, p := range n.prefixes(node) {
		if FamilyOf(p.Addr()) == family {
			if p.Bits() == 0 {
				return true
			}
			restricted = true
		}
	}
	return !restricted
}

func (n NodePortAddresses) prefixes(node *Node) []netip.Prefix {
	if len(n.Prefixes) == 0 {
		return node.primaryPrefixes()
	}
	return n.Prefixes
}

func (n NodePortAddresses) contains(addr netip.Addr, node *Node) bool {
	restricted := false
	for _, p := range n.prefixes(node) {
		if p.Contains(addr) {
			return true
		}
		restricted = restricted || FamilyOf(p.Addr()) == FamilyOf(addr)
	}
	return !restricted
}

// primaryPrefixes returns the node IPs as ranges. A loopback address is left out: it is
// the placeholder for one that is not known.
func (n *Node) primaryPrefixes() []netip.Prefix {
	var prefixes []netip.Prefix
	for _, ip := range n.PrimaryIPs {
		if !ip.IsLoopback() {
			prefixes = append(prefixes, netip.PrefixFrom(ip, ip.BitLen()))
		}
	}
	return prefixes
}
