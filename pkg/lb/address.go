package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

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
// ignores, special addresses and those above its limits are left out.
func (r *resolver) addresses(family Family) []address {
	s := r.svc
	clusterIP := s.clusterIP(family)
	if !clusterIP.IsValid() {
		return nil
	}
	found := append(take(&r.memory.addrs, 1+r.loadBalancers+len(r.externalIPs)), address{ip: clusterIP, kind: KindClusterIP})
	index := make(map[netip.Addr]int) // of found
	index[clusterIP] = 0
	add := func(ip netip.Addr, kind Kind, restricted bool) {
		if FamilyOf(ip) != family || IsSpecial(ip) {
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
		if listed && FamilyOf(ip) == family && !IsSpecial(ip) {
			return ip
		}
	}
	return netip.Addr{}
}

// IsSpecial reports whether ip means another destination in each network namespace, or on
// each link: an unspecified, loopback, link-local, multicast or broadcast address. No Service has it: it would take
// the localhost of all pods, what they reach on their link, or what they send to their groups. No endpoint has it: a client would
// reach its own localhost, the metadata service of its node, or any host that has joined a group. An API server refuses
// these addresses as external IPs and as endpoints, but for broadcast and groups beyond a link, and none as those of a load balancer.
func IsSpecial(ip netip.Addr) bool {
	ip = ip.Unmap()
	return ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip == broadcast
}

// broadcast is all hosts on a link.
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// takesAPIServer reports whether a claim at an external address would take connections to an API
// server, and notes it: it would last even when the Service is deleted, since this agent, too, would be led elsewhere.
// A Service that leads to the API servers alone may have their address, as a load balancer in front of
// them.
func (r *resolver) takesAPIServer(at address, c *claim, endpoints []EndpointState) bool {
	addr := netip.AddrPortFrom(at.ip, c.port)
	if at.kind == KindClusterIP || c.name.Protocol != TCP || !r.node.isAPIServer(addr) {
		return false
	}
	leadsElsewhere := func(e EndpointState) bool { return !slices.Contains(r.node.APIServers, e.Addr) }
	if len(endpoints) > 0 && !slices.ContainsFunc(endpoints, leadsElsewhere) {
		return false
	}
	field := "spec.externalIPs"
	if at.kind == KindLoadBalancer {
		field = "status.loadBalancer.ingress"
	}
	r.problem(field, "%s is not in use: an API server answers there, and the Service leads elsewhere", addr)
	return true
}

// isAPIServer reports whether an API server answers at addr.
func (n *Node) isAPIServer(addr netip.AddrPort) bool {
	return slices.Contains(n.Dialed, addr) || slices.Contains(n.APIServers, addr)
}

// unspecified returns the address that stands for all addresses of the node.
func unspecified(family Family) netip.Addr {
	if family == IPv4 {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// claim is a service port and the port numbers at which clients reach it. A number
// that an earlier port of the Service has is zero here.
type claim struct {
	name     PortName
	port     uint16 // at the Service's addresses
	nodePort uint16 // at the node's; zero: none
}

// portID is what identifies a port of a Service: its name or its number, each with the
// protocol. No two ports may have one in common.
type portID[T string | uint16] struct {
	id       T
	protocol Protocol
}

// claims returns the valid ports of the Service. Of two ports with the same number, the
// first gets it.
func (r *resolver) claims() []claim {
	claims := slices.Grow(r.memory.claims[:0], len(r.ports))
	r.memory.claims = claims
	names := make(map[portID[string]]struct{})
	ports := make(map[portID[uint16]]string) // the name of the port that has the number
	nodePorts := make(map[portID[uint16]]string)
	// unclaimed returns want, a number of port i, or zero if an earlier port has it.
	unclaimed := func(i int, field string, want uint16, earlier map[portID[uint16]]string) uint16 {
		number := portID[uint16]{want, r.ports[i].Protocol}
		owner, claimed := earlier[number]
		if want == 0 || claimed {
			if claimed {
				r.problemAt("spec.ports[%d]."+field, i, "%d/%s is that of port %q already", want, number.protocol, owner)
			}
			return 0
		}
		earlier[number] = r.ports[i].Name
		return want
	}
	for i, p := range r.ports {
		name := portID[string]{p.Name, p.Protocol}
		_, named := names[name]
		switch {
		case p.Port == 0:
			r.problemAt("spec.ports[%d].port", i, "must not be zero")
		case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
			r.problemAt("spec.ports[%d].protocol", i, "neither TCP nor UDP nor SCTP")
		case named:
			r.problemAt("spec.ports[%d].name", i, "an earlier port has the name %q too", p.Name)
		default:
			names[name] = struct{}{}
			claims = append(claims, claim{
				name:     PortName{Service: r.svc.Name, Port: p.Name, Protocol: p.Protocol},
				port:     unclaimed(i, "port", p.Port, ports),
				nodePort: unclaimed(i, "nodePort", p.NodePort, nodePorts),
			})
		}
	}
	return claims
}

// sourceRanges are the addresses from which clients may connect to a Service's load
// balancers in one family. Without ranges, every client may.
type sourceRanges struct {
	ranges     []netip.Prefix
	nodeInside bool
	overLimit  bool // there are too many ranges: no client may connect
}

// sourceRanges returns the source ranges of one family, within the node's limits. They
// fail open as kube-proxy's do: if one of them contains all addresses, or none is of the
// family, every client may connect.
func (r *resolver) sourceRanges(family Family) sourceRanges {
	if r.overRanges && r.countSourceRanges(family) > 0 {
		return sourceRanges{overLimit: true}
	}
	var s sourceRanges
	for _, p := range r.svc.SourceRanges {
		if FamilyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			return sourceRanges{}
		}
		s.ranges = append(s.ranges, p.Masked())
	}
	nodeIP := r.node.primaryIP(family)
	s.nodeInside = slices.ContainsFunc(s.ranges, func(p netip.Prefix) bool { return p.Contains(nodeIP) })
	if s.nodeInside {
		s.ranges = append(s.ranges, r.svc.ownPrefixes(family)...)
	}
	slices.SortFunc(s.ranges, netip.Prefix.Compare)
	s.ranges = slices.Compact(s.ranges)
	return s
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

// NodePortAddresses are the ranges of the node's addresses that answer on node ports. Of a
// family without a range, all addresses answer.
//
// The zero value, kube-proxy's default in nftables mode, means "primary": the
// node's primary IPs are the ranges. (The default of its iptables mode is
// 0.0.0.0/0 and ::/0.)
type NodePortAddresses struct {
	Prefixes []netip.Prefix
	// Primary makes the node's primary IPs ranges beside Prefixes.
	Primary bool
}

// The words that stand for ranges in kube-proxy's nodePortAddresses (KEP-6032).
const (
	NodePortsPrimary   = "primary"   // the node's primary IPs
	NodePortsLocalhost = "localhost" // 127.0.0.0/8 and ::1/128
	NodePortsAll       = "all"       // 0.0.0.0/0 and ::/0
)

// ParseNodePortAddresses parses the list of kube-proxy's nodePortAddresses: address ranges, and
// words that stand for some. An empty list is "primary". The error names the bad element.
func ParseNodePortAddresses(list []string) (NodePortAddresses, error) {
	var n NodePortAddresses
	for i, s := range list {
		switch s {
		case NodePortsPrimary:
			n.Primary = true
		case NodePortsLocalhost:
			n.Prefixes = append(n.Prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), netip.PrefixFrom(netip.IPv6Loopback(), 128))
		case NodePortsAll:
			n.Prefixes = append(n.Prefixes, netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0))
		default:
			prefix, err := ParsePrefix(s)
			if err != nil {
				return NodePortAddresses{}, fmt.Errorf("nodePortAddresses[%d]: %w", i, err)
			}
			n.Prefixes = append(n.Prefixes, prefix)
		}
	}
	return n, nil
}

// NeedPrimary reports whether the node's primary IPs are ranges.
func (n NodePortAddresses) NeedPrimary() bool { return n.Primary || len(n.Prefixes) == 0 }

// Contains reports whether one of n's own ranges, without the primary IPs, contains an address.
func (n NodePortAddresses) Contains(addr netip.Addr) bool { return contains(n.Prefixes, addr) }

// Loopback reports whether the list selects the loopback address of a family, at which node ports
// answer the node's own processes. Primary IPs are none.
func (n NodePortAddresses) Loopback(family Family) bool {
	loopback := netip.IPv6Loopback()
	if family == IPv4 {
		loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	return n.Contains(loopback) || !n.NeedPrimary() && len(n.ofFamily(family, nil)) == 0
}

// Select returns the addresses of local, the node's own, that answer on node
// ports, in their order. Primary are [Node].PrimaryIPs. Loopback addresses never do; sockets of the node that
// connect to one are treated elsewhere.
func (n NodePortAddresses) Select(local, primary []netip.Addr) []netip.Addr {
	var selected []netip.Addr
	for _, addr := range local {
		ranges := n.ofFamily(FamilyOf(addr), primary)
		if !addr.IsLoopback() && (len(ranges) == 0 || contains(ranges, addr)) {
			selected = append(selected, addr)
		}
	}
	return selected
}

// All reports whether every address of a family is selected, now and later, its loopback
// address included. Then the unspecified address stands for them.
func (n NodePortAddresses) All(family Family, primary []netip.Addr) bool {
	ranges := n.ofFamily(family, primary)
	return len(ranges) == 0 || slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Bits() == 0 })
}

// ofFamily returns the ranges of one family: n's, and the primary addresses if they are ranges. A
// loopback address is no node IP but the placeholder for one that is not known.
func (n NodePortAddresses) ofFamily(family Family, primary []netip.Addr) []netip.Prefix {
	var ranges []netip.Prefix
	for _, p := range n.Prefixes {
		if FamilyOf(p.Addr()) == family {
			ranges = append(ranges, p)
		}
	}
	if !n.NeedPrimary() {
		return ranges
	}
	for _, ip := range primary {
		if FamilyOf(ip) == family && !ip.IsLoopback() {
			ranges = append(ranges, netip.PrefixFrom(ip, ip.BitLen()))
		}
	}
	return ranges
}

func contains(ranges []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// ParseAddr parses an address as kube-proxy does: leading zeros are accepted
// and ignored, so 10.0.0.010 is 10.0.0.10. An IPv4 address that is written
// as IPv6 (::ffff:10.0.0.1) is IPv4. Space and zones (fe80::1%eth0) are errors.
func ParseAddr(s string) (netip.Addr, error) {
	addr, err := parseMapped(s)
	return addr.Unmap(), err
}

// ParsePrefix parses an address range as kube-proxy does: like [ParseAddr], but it drops
// space around the text and bits behind the prefix.
func ParsePrefix(s string) (netip.Prefix, error) {
	s = strings.TrimSpace(s)
	text, length, found := strings.Cut(s, "/")
	if !found {
		return netip.Prefix{}, fmt.Errorf("%q is not an address range: no slash", s)
	}
	addr, err := parseMapped(text)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits, err := strconv.ParseUint(length, 10, 8)
	if err != nil || int(bits) > addr.BitLen() {
		return netip.Prefix{}, fmt.Errorf("%q is not an address range: bad prefix length", s)
	}
	if addr.Is4In6() {
		if bits < 96 {
			return netip.Prefix{}, fmt.Errorf("%q is not an address range: IPv4 and IPv6 at once", s)
		}
		addr, bits = addr.Unmap(), bits-96
	}
	return netip.PrefixFrom(addr, int(bits)).Masked(), nil
}

// parseMapped is ParseAddr but for the last step.
func parseMapped(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil { // rare, and mostly for leading zeros
		addr, err = netip.ParseAddr(trimZeros(s))
	}
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	}
	return addr, nil
}

// trimZeros drops the leading zeros of every number in an address.
func trimZeros(s string) string {
	trimmed := make([]byte, 0, len(s))
	leading := true
	for i := range len(s) {
		last := i+1 == len(s) || isSeparator(s[i+1])
		if leading && s[i] == '0' && !last {
			continue
		}
		leading = isSeparator(s[i])
		trimmed = append(trimmed, s[i])
	}
	return string(trimmed)
}

func isSeparator(c byte) bool { return c == '.' || c == ':' }
