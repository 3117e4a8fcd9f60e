package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
)

// Device is a network device of the node.
type Device struct {
	node.Decision
	MTU int
	// RPFilter is the reverse path filter that is in force: 0 off, 1 strict, 2 loose.
	RPFilter int
	// NotForwarding is set if the kernel forwards no packet of IPv4 that arrives there.
	NotForwarding bool
}

// uplinks returns the devices that lead to other hosts, without tunnels and virtual ones.
func (n Node) uplinks() []Device {
	var uplinks []Device
	for _, d := range n.Devices.Value {
		if d.Class == node.ClassUplink && tunnelOverhead[d.Kind] == 0 && (d.Network.IsValid() || d.Gateway.IsValid()) {
			uplinks = append(uplinks, d)
		}
	}

	return uplinks
}

// classes describes each device to which programs are attached, or why none is.
func (n Node) classes() []string {
	var attached, others []string
	for _, d := range n.Devices.Value {
		if d.Class != node.ClassNone {
			attached = append(attached, fmt.Sprintf("%s (%s)", d.Name, d.Class))
		} else {
			others = append(others, fmt.Sprintf("%s (%s)", d.Name, d.Reason))
		}
	}
	if len(attached) > 0 {
		return attached
	}

	return others
}

func checkIPsec(n Node) []Finding {
	switch {
	case n.IPsecPolicies.Value == 0:
		return ok("no IPsec policies")
	case n.Config.ThroughStack:
		return ok("%d IPsec policies; with --forwarding stack they apply to everything", n.IPsecPolicies.Value)
	}

	return warning(fmt.Sprintf("%d IPsec policies: the agent lets packets to other nodes pass the network stack as long as there is one", n.IPsecPolicies.Value),
		"Set --forwarding stack on nodes with IPsec: a policy that appears later applies only when the agent has noticed it.")
}

func checkIPForward(n Node) []Finding {
	has := func(isOf func(netip.Addr) bool) bool {
		return slices.ContainsFunc(n.Addresses, func(a netip.Addr) bool { return isOf(a) && a.IsGlobalUnicast() })
	}
	if !n.IPForward.Value.V4 && has(netip.Addr.Is4) {
		return problem("net.ipv4.ip_forward is 0: packets from outside do not reach pods",
			"Set net.ipv4.ip_forward=1, now and below /etc/sysctl.d.")
	}
	if !n.IPForward.Value.V6 && has(netip.Addr.Is6) {
		return warning("net.ipv6.conf.all.forwarding is 0, and the node has IPv6 addresses: packets over IPv6 from outside do not reach pods",
			"Set net.ipv6.conf.all.forwarding=1 if the cluster has IPv6, now and below /etc/sysctl.d.")
	}

	var off []string
	for _, d := range n.Devices.Value {
		// The network stack gets the packets of a bridge's port by the bridge.
		if d.NotForwarding && (d.Kind == "bridge" || d.Class != node.ClassNone && d.Bridge == 0) {
			off = append(off, "net.ipv4.conf."+d.Name+".forwarding")
		}
	}
	if len(off) > 0 {
		return problem(fmt.Sprintf("%s is 0: what arrives there is not forwarded to pods", strings.Join(off, ", ")),
			"Set it to 1, now and below /etc/sysctl.d, where it comes after net.ipv4.ip_forward, which sets it for all devices.")
	}

	return ok("packets are forwarded")
}

// checkForwardFirewall finds firewalls that drop every forwarded packet unless a rule accepts it.
func checkForwardFirewall(n Node) []Finding {
	var drops []string
	for _, rule := range n.Netfilter.Value.Drops {
		if rule.Ports == nil && !rule.Destination.IsValid() && strings.HasPrefix(rule.Does, "by its policy") {
			drops = append(drops, rule.String())
		}
	}
	if len(drops) == 0 {
		return ok("no firewall drops what is forwarded by its policy")
	}

	return warning("a firewall drops what is forwarded, unless its rules accept it: "+strings.Join(drops, ", "),
		"Have its rules accept packets from and to pods, as those of kube-proxy do; sluice explain names it where it may drop a connection.")
}

func checkRPFilter(n Node) []Finding {
	uplinks := n.uplinks()
	var strict []string
	for _, d := range uplinks {
		if d.RPFilter == 1 {
			strict = append(strict, d.Name)
		}
	}
	if len(uplinks) > 1 && len(strict) > 0 {
		return warning(fmt.Sprintf("the node has %d uplinks, and rp_filter is strict on %s", len(uplinks), status.ListText(strict)),
			"Set net.ipv4.conf.DEVICE.rp_filter=2 (and that of all to 0 or 2), or packets that come by another uplink than their answers take are dropped.")
	}

	return ok("rp_filter drops nothing of what uplinks get")
}

func checkPorts(n Node) []Finding {
	var findings []Finding
	for _, r := range n.Ephemeral.Value {
		if r.Low <= node.NodePorts.High && r.High >= node.NodePorts.Low {
			findings = append(findings, warning(fmt.Sprintf("sockets of the node get ports %d-%d, and node ports are %d-%d", r.Low, r.High, node.NodePorts.Low, node.NodePorts.High),
				fmt.Sprintf("Set net.ipv4.ip_local_reserved_ports=%d-%d, or begin net.ipv4.ip_local_port_range above.", node.NodePorts.Low, node.NodePorts.High))...)

			break
		}
	}
	if problem, remedy := n.Masquerade.Value.Problem(); problem != "" {
		findings = append(findings, warning(problem, remedy)...)
	}
	if len(findings) > 0 {
		return findings
	}

	return ok("node ports are not given to sockets, and connections are masqueraded with the ports %s", n.Masquerade.Value)
}

// tunnelOverhead is by how many bytes packets grow in a tunnel, at least: with IPv4 outside.
var tunnelOverhead = map[string]int{"vxlan": 50, "geneve": 50, "ipip": 20, "sit": 20, "gre": 24, "gretap": 38, "ip6tnl": 40, "wireguard": 60}

// checkMTU compares what pods may send with what tunnels take, and that with what uplinks take. As
// the uplink that a tunnel uses is not known, the smallest counts, of those with a gateway if any has.
func checkMTU(n Node) []Finding {
	uplinks := n.uplinks()
	if len(uplinks) == 0 {
		return ok("there is no uplink to compare with")
	}
	if routed := slices.DeleteFunc(slices.Clone(uplinks), func(d Device) bool { return !d.Gateway.IsValid() }); len(routed) > 0 {
		uplinks = routed
	}
	byMTU := func(a, b Device) int { return a.MTU - b.MTU }
	least := slices.MinFunc(uplinks, byMTU)
	limit, limiting := least.MTU, least.Name
	var findings []Finding
	for _, d := range n.Devices.Value {
		overhead := tunnelOverhead[d.Kind]
		if overhead == 0 || !d.IsUp {
			continue
		}
		if d.MTU+overhead > least.MTU {
			findings = append(findings, warning(fmt.Sprintf("%s has an MTU of %d, and %d with its headers, but %s only %d", d.Name, d.MTU, d.MTU+overhead, least.Name, least.MTU),
				fmt.Sprintf("Set the MTU of the CNI to %d or less.", least.MTU-overhead))...)
		}
		if d.MTU < limit {
			limit, limiting = d.MTU, d.Name
		}
	}
	for _, d := range n.Devices.Value {
		if d.Class == node.ClassPods && tunnelOverhead[d.Kind] == 0 && d.MTU > limit {
			return append(findings, warning(fmt.Sprintf("pods send packets of up to %d bytes (%s), and %s takes %d", d.MTU, d.Name, limiting, limit),
				fmt.Sprintf("Set the MTU of the CNI to %d, or connections depend on ICMP errors to find it out.", limit))...)
		}
	}
	if len(findings) > 0 {
		return findings
	}

	return ok("packets of up to %d bytes leave by %s", limit, limiting)
}
