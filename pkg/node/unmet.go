package node

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// NewUnmet returns what the configuration names and neither this node nor the cluster has, if that may have
// changed. Nothing is missing before it is known.
func (m *Model) NewUnmet() ([]lb.Problem, bool) {
	if !m.unmetChanged || !m.HasState() || m.awaitsObject && !m.existed {
		return nil, false
	}
	m.unmetChanged = false

	return slices.Concat(m.unmetNode(), m.unmetAddresses(), m.unmetNodePorts(), m.unmetPods(), m.unmetDevices(), m.unmetUDP()), true
}

func (m *Model) nodeObject() string { return "Node " + m.cfg.NodeName }

// unmetNode returns a problem if the Node object is missing.
func (m *Model) unmetNode() []lb.Problem {
	switch {
	case m.exists && len(m.PrimaryIPs()) == 0 && !m.awaitsObject && m.cfg.NodePortAddresses.NeedPrimary():
		return []lb.Problem{{
			Object: m.nodeObject(), Field: "status.addresses", Message: "it has no InternalIP and no ExternalIP, so node ports answer at every address of this node",
			Remedy: "Let the kubelet or the cloud's controller set them, or set bindAddress (--bind-address)", Effect: lb.Degraded,
		}}
	case m.exists || m.cfg.NodeOptional || !m.received: // until it is received, the API server's silence is what is told
		return nil
	case m.existed:
		return []lb.Problem{{
			Object: m.nodeObject(), Message: "it is gone, so load balancers leave this node out (/healthz)",
			Remedy: "Let its kubelet register it again, or stop the agent of a node that has left the cluster", Effect: lb.Degraded,
		}}
	}

	return []lb.Problem{{
		Object: lb.Configuration, Field: "hostnameOverride", Value: m.cfg.NodeName,
		Message: "the cluster has no Node of this name: no endpoint counts as one of this node, so nothing answers where a traffic policy is Local, and load balancers leave this node out (/healthz)",
		Remedy:  "Set hostnameOverride (--hostname-override; by default it is the host name) to this node's name in kubectl get nodes", Effect: lb.Failing,
	}}
}

// hasAddress reports whether a device of this node has the address.
func (m *Model) hasAddress(ip netip.Addr) bool {
	return slices.ContainsFunc(m.state.Addresses, func(a Address) bool { return a.Addr == ip })
}

// addressesOf returns the addresses of a family by which other hosts may reach this node.
func (m *Model) addressesOf(family lb.Family) []netip.Addr {
	var addrs []netip.Addr
	for _, a := range m.state.Addresses {
		if lb.FamilyOf(a.Addr) == family && a.Addr.IsGlobalUnicast() && !slices.Contains(addrs, a.Addr) {
			addrs = append(addrs, a.Addr)
		}
	}

	return addrs
}

// unmetAddresses returns a problem for each primary address that no device has. A Node may have an address of a family that
// this node does not have, beside one that it has.
func (m *Model) unmetAddresses() []lb.Problem {
	var problems []lb.Problem
	beside := slices.ContainsFunc(m.PrimaryIPs(), m.hasAddress)
	for _, ip := range m.PrimaryIPs() {
		if m.hasAddress(ip) || beside && ip != m.cfg.NodeIP && len(m.addressesOf(lb.FamilyOf(ip))) == 0 {
			continue
		}
		p := lb.Problem{
			Object: m.nodeObject(), Field: "status.addresses", Value: ip.String(), Message: "no device of this node has this address",
			Remedy: "Correct the kubelet's --node-ip, or give the address to a device", Effect: lb.Degraded,
		}
		if ip == m.cfg.NodeIP {
			p.Object, p.Field = lb.Configuration, "bindAddress"
			p.Remedy = "Set bindAddress (--bind-address) to an address of this node, or leave it out: the Node has one"
		}
		family := lb.FamilyOf(ip)
		if len(m.cfg.NodePortAddresses.Select(m.addressesOf(family), m.PrimaryIPs())) == 0 {
			p.Message += fmt.Sprintf(": node ports do not answer on %s, as it is their primary address", family)
			p.Effect = lb.Failing
		}
		problems = append(problems, p)
	}

	return problems
}

// unmetNodePorts returns a problem for each family of nodePortAddresses of which no range has an address of this
// node. One list may serve many nodes, so ranges beside one that matches, and those of a family that the node does not
// have, are no mistake. Neither are loopback addresses alone, and all addresses, of which there may be none yet.
func (m *Model) unmetNodePorts() []lb.Problem {
	ranges := map[lb.Family][]string{}
	answers := false // in one family
	for _, p := range m.cfg.NodePortAddresses.Prefixes {
		if !p.Addr().IsLoopback() && p.Bits() > 0 {
			ranges[lb.FamilyOf(p.Addr())] = append(ranges[lb.FamilyOf(p.Addr())], p.String())
		}
	}
	selected := func(family lb.Family) bool {
		return len(m.cfg.NodePortAddresses.Select(m.addressesOf(family), m.PrimaryIPs())) > 0
	}
	for family := range ranges {
		answers = answers || selected(family)
	}
	var problems []lb.Problem
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		have := m.addressesOf(family)
		if len(ranges[family]) == 0 || selected(family) || len(have) == 0 && answers {
			continue
		}
		what := fmt.Sprintf("this node has no %s address", family)
		if len(have) > 0 {
			what = "none of this node's addresses is in it: " + listOf(have, netip.Addr.String)
		}
		problems = append(problems, lb.Problem{
			Object: lb.Configuration, Field: "nodePortAddresses", Value: strings.Join(ranges[family], ","),
			Message: fmt.Sprintf("%s; node ports do not answer on %s", what, family),
			Remedy:  `Add a range that has an address of this node, or "primary" (--nodeport-addresses)`, Effect: lb.Failing,
		})
	}

	return problems
}

// unmetPods returns a problem if the detection of this node's pods finds none of those that there are.
func (m *Model) unmetPods() []lb.Problem {
	const outside = "what they send by their devices counts as from outside, so it is masqueraded, and goes to endpoints of this node alone where externalTrafficPolicy is Local"
	switch m.cfg.Local.Mode {
	case LocalBridgeInterface, LocalInterfaceNamePrefix:
		rules := m.cfg.Devices
		rules.PodBridge, rules.PodPrefix = "", ""
		pods := devicesWith(m.state.Devices, rules, ClassPods)
		if len(pods) == 0 || len(devicesWith(m.state.Devices, m.cfg.Devices, ClassPods)) > 0 {
			return nil
		}
		p := lb.Problem{
			Object: lb.Configuration, Field: "detectLocal.bridgeInterface", Value: m.cfg.Devices.PodBridge,
			Remedy: "Set it (--pod-bridge-interface) to the bridge of this node's pods", Effect: lb.Degraded,
		}
		if m.cfg.Devices.PodPrefix != "" {
			p.Field, p.Value = "detectLocal.interfaceNamePrefix", m.cfg.Devices.PodPrefix
			p.Remedy = "Set it (--pod-interface-name-prefix) to the prefix that the CNI plugin gives devices of pods"
		}
		p.Message = fmt.Sprintf("none of the devices that lead to pods (%s) is detected by it: %s", namesOf(pods), outside)

		return []lb.Problem{p}
	case LocalNodeCIDR:
		if m.exists && len(m.podCIDRs) == 0 {
			return []lb.Problem{{
				Object: m.nodeObject(), Field: "spec.podCIDRs", Message: "it has none, and detectLocalMode is NodeCIDR, so no pod of this node is detected: " + outside,
				Remedy: "Let the controller manager allocate them (--allocate-node-cidrs), or set another detectLocalMode", Effect: lb.Degraded,
			}}
		}
	case LocalClusterCIDR:
		var problems []lb.Problem
		for _, cluster := range firstOfEachFamily(m.cfg.Local.ClusterCIDRs) {
			for _, pods := range firstOfEachFamily(m.podCIDRs) {
				if lb.FamilyOf(pods.Addr()) == lb.FamilyOf(cluster.Addr()) && !pods.Overlaps(cluster) {
					problems = append(problems, lb.Problem{
						Object: lb.Configuration, Field: "clusterCIDR", Value: cluster.String(),
						Message: fmt.Sprintf("the podCIDR of this node, %s, is not in it, so no pod of this node is detected: %s", pods, outside),
						Remedy:  "Set clusterCIDR (--cluster-cidr) to the range of all pods", Effect: lb.Degraded,
					})
				}
			}
		}

		return problems
	}

	return nil
}

// devicesWith returns the names of the devices that have a class by these rules.
func devicesWith(devices []Device, rules Rules, class Class) []string {
	var names []string
	for _, d := range Decide(devices, rules) {
		if d.Class == class {
			names = append(names, d.Name)
		}
	}

	return names
}

// unmetDevices returns a problem for each pattern of --devices that is the name of no device, or that would be one of
// a device that leads to other hosts, if nothing is attached to any such device. Devices of pods come and go, and one list
// may serve many nodes. Nothing is wrong if a device that is excluded does not exist.
func (m *Model) unmetDevices() []lb.Problem {
	every := m.cfg.Devices
	every.Only = nil
	uplinks := devicesWith(m.state.Devices, every, ClassUplink)
	missed := len(uplinks) > 0 && len(devicesWith(m.state.Devices, m.cfg.Devices, ClassUplink)) == 0
	var problems []lb.Problem
	for _, p := range m.cfg.Devices.Only {
		matches := func(d Device) bool { ok, err := path.Match(p.Glob, d.Name); return ok && err == nil }
		isName := !strings.ContainsAny(p.Glob, `*?[\`)
		if slices.ContainsFunc(m.state.Devices, matches) || !isName && (!missed || p.Class == ClassPods) {
			continue
		}
		problem := lb.Problem{
			Object: lb.Configuration, Field: "--devices", Value: p.String(), Message: "this node has no such device",
			Remedy: "Name the devices that lead to other hosts and to pods, or leave --devices out: they are detected", Effect: lb.Degraded,
		}
		if missed && p.Class != ClassPods {
			problem.Message += ", and programs are attached to none that leads to other hosts: node ports do not answer what arrives by " +
				namesOf(uplinks)
			problem.Effect = lb.Failing
		}
		problems = append(problems, problem)
	}

	return problems
}

// unmetUDP returns a problem if the configuration leaves the datagrams of pods to devices, and those out.
func (m *Model) unmetUDP() []lb.Problem {
	pods := m.excluded(ClassPods)
	if !m.cfg.UDPAtDevices || len(pods) == 0 {
		return nil
	}

	return []lb.Problem{{
		Object: lb.Configuration, Field: "--udp", Value: "off",
		Message: "it leaves what pods send over UDP to their devices, and nothing is attached to " + namesOf(pods) +
			", which --devices or --exclude-devices leave out: UDP from there to Services is not translated",
		Remedy: "Attach to the devices of pods, or leave --udp out", Effect: lb.Degraded,
	}}
}

// excluded returns the names of the devices of a class that --devices and --exclude-devices leave out.
func (m *Model) excluded(class Class) []string {
	every := m.cfg.Devices
	every.Only, every.Never = nil, nil
	attached := devicesWith(m.state.Devices, m.cfg.Devices, ClassPods)
	attached = append(attached, devicesWith(m.state.Devices, m.cfg.Devices, ClassUplink)...)

	return slices.DeleteFunc(devicesWith(m.state.Devices, every, class), func(name string) bool { return slices.Contains(attached, name) })
}

// Limits returns what no program translates, since the configuration leaves devices or addresses out.
func (m *Model) Limits() []string {
	var limits []string
	if pods := m.excluded(ClassPods); len(pods) > 0 {
		limits = append(limits, "what pods behind "+namesOf(pods)+" send to Services past their sockets (SCTP; all of what has no socket hooks, "+
			"as pods that opted out, virtual machines and networks behind a pod): --devices or --exclude-devices leave these devices out")
	}
	if uplinks := m.excluded(ClassUplink); len(uplinks) > 0 {
		limits = append(limits, "what arrives for Services by "+namesOf(uplinks)+": --devices or --exclude-devices leave these devices out")
	}

	return append(limits, m.nodePortLimits()...)
}

// nodePortLimits returns where the configuration leaves no node ports. That they answer on some of a family's addresses
// only is what it is for.
func (m *Model) nodePortLimits() []string {
	var localhost, elsewhere []string
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		have := m.addressesOf(family)
		if len(have) == 0 {
			continue
		}
		if slices.Contains(m.cfg.NoLocalhostNodePorts, family) {
			localhost = append(localhost, family.String())
		}
		if m.cfg.NodePortAddresses.Loopback(family) && len(m.cfg.NodePortAddresses.Select(have, m.PrimaryIPs())) == 0 {
			elsewhere = append(elsewhere, family.String())
		}
	}
	var limits []string
	if len(localhost) > 0 {
		limits = append(limits, "node ports on loopback addresses of "+strings.Join(localhost, " and ")+
			": nodePortAddresses (--nodeport-addresses) or iptables.localhostNodePorts (--iptables-localhost-nodeports) leaves them out")
	}
	if len(elsewhere) > 0 {
		limits = append(limits, "node ports on all but loopback addresses of "+strings.Join(elsewhere, " and ")+
			": nodePortAddresses (--nodeport-addresses) has no others")
	}

	return limits
}

func namesOf(devices []string) string {
	return listOf(devices, func(name string) string { return name })
}

// listOf returns the first elements of a list, with the number of the others.
func listOf[T any](list []T, text func(T) string) string {
	const most = 3
	texts := make([]string, 0, most)
	for _, element := range list[:min(most, len(list))] {
		texts = append(texts, text(element))
	}
	joined := strings.Join(texts, ", ")
	if more := len(list) - most; more > 0 {
		joined += fmt.Sprintf(" and %d more", more)
	}

	return joined
}
