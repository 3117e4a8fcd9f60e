package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
)

// programs returns hook and name of each program that matches.
func programs(all []datapath.Foreign, match func(datapath.Foreign) bool) []string {
	var found []string
	for _, f := range all {
		if match(f) {
			found = append(found, f.Hook+": "+f.Program)
		}
	}

	return found
}

func excludes(f datapath.Foreign) bool { return f.Excludes }

func checkCgroupHooks(n Node) []Finding {
	if n.Cgroup.Err != nil {
		return ok("there is no cgroup to look at yet")
	}
	if n.CgroupPrograms.Err != nil {
		return unseen(n.CgroupPrograms.Err)
	}
	all := n.CgroupPrograms.Value
	if found := programs(all, excludes); len(found) > 0 {
		return problem("attached so that no other program is allowed beside it: "+status.ListText(found),
			"Stop its owner, or have it attach with BPF_F_ALLOW_MULTI (as a link); bpftool cgroup tree shows where it is.")
	}
	// Of programs at the other hooks, none decides where a socket connects.
	found := programs(all, func(f datapath.Foreign) bool {
		return strings.HasPrefix(f.Hook, "connect") || strings.HasPrefix(f.Hook, "sendmsg")
	})
	if len(found) > 0 {
		return warning("other programs decide about the same sockets: "+status.ListText(found),
			"Make sure that they translate or refuse no address of a Service: of two that do, the one that runs first decides.")
	}
	if len(all) > 0 {
		return ok("other programs only watch: %s", status.ListText(programs(all, func(datapath.Foreign) bool { return true })))
	}

	return ok("no other program is at the hooks of sockets")
}

// checkDeviceHooks reports what the agent sees of its own programs, if one runs.
func checkDeviceHooks(n Node) []Finding {
	var findings []Finding
	if len(n.uplinks()) == 0 {
		findings = append(findings, warning("no device looks as if it led to other hosts: "+status.ListText(n.classes()),
			"Name the node's device with --devices NAME=uplink, or look at why it has no address of a network.")...)
	}
	all := n.DevicePrograms.Value
	var noRoom, leftOut []string // uplinks and devices of pods with a qdisc that excludes clsact
	for _, f := range all {
		if !f.Excludes || !n.byClsact() {
			continue
		}
		name, _, _ := strings.Cut(f.Hook, " ")
		if slices.ContainsFunc(n.Devices.Value, func(d Device) bool { return d.Name == name && d.Class == node.ClassPods }) {
			leftOut = append(leftOut, name)
		} else {
			noRoom = append(noRoom, f.Hook+": "+f.Program)
		}
	}
	if n.Agent.Err == nil {
		for _, d := range n.Agent.Value.Devices {
			if d.Problem != "" && !slices.Contains(leftOut, d.Name) {
				findings = append(findings, problem(d.Name+": "+d.Problem,
					"Detach the program that is named, or have its owner attach it behind that of Sluice and return TC_ACT_UNSPEC.")...)
			}
		}
	}
	if len(noRoom) > 0 {
		findings = append(findings, problem("no room for clsact: "+status.ListText(noRoom),
			"Have the owner of the qdisc use clsact instead, as ingress and clsact exclude each other.")...)
	}
	if len(leftOut) > 0 {
		findings = append(findings, warning("these devices of pods have the qdisc ingress, as of a bandwidth limit, and stay without programs: "+status.ListText(leftOut),
			"Services are resolved for the sockets of these pods. Where they need more (SCTP, a pod that opts out), use Linux 6.6 or later, or take the limit away.")...)
	}
	xdp := programs(all, func(f datapath.Foreign) bool { return strings.HasSuffix(f.Hook, " xdp") })
	if len(xdp) > 0 {
		findings = append(findings, warning("XDP programs see packets before Sluice: "+status.ListText(xdp),
			"Make sure that they pass packets to node ports and load balancers' addresses on to the stack.")...)
	}
	ahead := programs(all, func(f datapath.Foreign) bool { return f.Ahead && strings.HasSuffix(f.Hook, " ingress") })
	if len(ahead) > 0 && n.Agent.Err != nil {
		findings = append(findings, warning("other programs run before that of Sluice: "+status.ListText(ahead),
			"Start the agent: it overtakes them, and sluice status reports one that still ends the chain.")...)
	}
	if len(findings) > 0 {
		return findings
	}
	others := programs(all, func(f datapath.Foreign) bool { return !f.Excludes })
	behind := programs(all, func(f datapath.Foreign) bool {
		return !f.Excludes && !f.Ahead && slices.ContainsFunc(n.uplinks(), func(d Device) bool { return f.Hook == d.Name+" ingress" })
	})
	if len(behind) > 0 && !n.Config.ThroughStack {
		return ok("programs of others stay; packets to backends on other nodes pass the network stack, or these would not see them: %s",
			status.ListText(behind))
	}
	if len(others) > 0 {
		return ok("programs of others stay, behind Sluice at ingress and before it at egress: %s", status.ListText(others))
	}

	return ok("no other program is at the devices: %s", status.ListText(n.classes()))
}

func checkKubeProxy(n Node) []Finding {
	var findings []Finding
	if pids := n.Processes.Value["kube-proxy"]; len(pids) > 0 {
		findings = append(findings, warning(fmt.Sprintf("kube-proxy runs (PID %d)", pids[0]),
			"Nothing has to be done before Sluice is installed, which translates before kube-proxy does; then stop kube-proxy.")...)
	}
	if n.Netfilter.Err != nil {
		return append(findings, unseen(n.Netfilter.Err)...)
	}
	var tables []string
	chains := make(map[string]int)
	for _, c := range n.Netfilter.Value.Chains {
		if strings.HasPrefix(c.Name, "KUBE-SVC-") || strings.HasPrefix(c.Name, "KUBE-SERVICES") || strings.HasSuffix(c.Table, " kube-proxy") {
			if chains[c.Table]++; chains[c.Table] == 1 {
				tables = append(tables, c.Table)
			}
		}
	}
	if len(tables) > 0 {
		findings = append(findings, warning("rules of kube-proxy are there: "+status.ListText(tables),
			"Once kube-proxy has stopped, remove them: sluice cleanup --kube-proxy, which keeps the connections that they have translated.")...)
	}
	if n.Processes.Err != nil {
		findings = append(findings, unseen(n.Processes.Err)...)
	}
	switch {
	case len(findings) > 0:
		return findings
	case !n.AllProcesses:
		return ok("no rules of kube-proxy; whether it runs is not seen from this PID namespace")
	}

	return ok("neither a process nor rules of kube-proxy")
}

// ipvsDevice has the addresses of Services when kube-proxy runs in IPVS mode, and afterwards.
const ipvsDevice = "kube-ipvs0"

func checkIPVS(n Node) []Finding {
	var seen []string
	if slices.ContainsFunc(n.Devices.Value, func(d Device) bool { return d.Name == ipvsDevice }) {
		seen = append(seen, "the device "+ipvsDevice+" has addresses of Services, at which the node itself answers")
	}
	if n.IPVS.Value > 0 {
		seen = append(seen, fmt.Sprintf("IPVS has %d virtual servers", n.IPVS.Value))
	}
	if len(seen) > 0 {
		return warning(strings.Join(seen, "; "),
			"Once kube-proxy has stopped, remove both: ipvsadm --clear; ip link delete "+ipvsDevice+".")
	}
	if n.IPVS.Err != nil {
		return unseen(n.IPVS.Err)
	}

	return ok("no virtual servers, and no device of them")
}

// named returns the names of the devices that begin with one of these prefixes.
func (n Node) named(prefixes ...string) []string {
	var names []string
	for _, d := range n.Devices.Value {
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(d.Name, p) }) {
			names = append(names, d.Name)
		}
	}

	return names
}

// programsNamed returns those of these programs whose names begin with a prefix.
func programsNamed(all []datapath.Foreign, prefixes ...string) []string {
	return programs(all, func(f datapath.Foreign) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(f.Program, p) })
	})
}

// foreignErr returns why programs of others could not be seen. Where there is no cgroup, there are none.
func (n Node) foreignErr() error {
	if n.Cgroup.Err != nil {
		return n.DevicePrograms.Err
	}

	return errors.Join(n.CgroupPrograms.Err, n.DevicePrograms.Err)
}

func checkCilium(n Node) []Finding {
	if replaces := programsNamed(n.CgroupPrograms.Value, "cil_sock"); len(replaces) > 0 {
		return problem("Cilium translates Services at sockets, too: "+status.ListText(replaces),
			"Run one of the two: set kubeProxyReplacement=false in Cilium and restart its agents, or do not install Sluice.")
	}
	var seen []string
	seen = append(seen, n.named("cilium_", "lxc")...)
	seen = append(seen, programsNamed(n.DevicePrograms.Value, "cil_")...)
	seen = append(seen, n.CiliumPins...)
	switch _, runs := n.Processes.Value["cilium-agent"]; {
	case len(seen) == 0 && !runs:
		return ok("nothing of Cilium")
	case !runs && n.Processes.Err == nil && n.AllProcesses:
		return warning("no cilium-agent runs, and this is left of it: "+status.ListText(seen),
			"If Cilium was removed, run cilium-dbg post-uninstall-cleanup on the node, or boot it.")
	}

	return ok("Cilium does not translate at sockets: %s", status.ListText(seen))
}

func checkCalico(n Node) []Finding {
	replaces := slices.Concat(n.named("bpfin.cali", "bpfout.cali"),
		programsNamed(n.CgroupPrograms.Value, "cali_", "calico_"), programsNamed(n.DevicePrograms.Value, "cali_"))
	if len(replaces) > 0 {
		return problem("Calico's eBPF dataplane translates Services, too: "+status.ListText(replaces),
			"Run one of the two: set bpfEnabled: false in Calico's FelixConfiguration, or do not install Sluice.")
	}
	if found := n.named("cali", "vxlan.calico", "tunl0"); len(found) > 0 {
		return ok("Calico does not translate Services: %s", status.ListText(found))
	}

	return ok("nothing of Calico")
}

// checkMesh reports pods in which a mesh redirects connections, and whose sockets are translated before: the mesh then
// does not know the Service, and lets pass what it is to refuse.
func checkMesh(n Node) []Finding {
	var in, unknown []string
	for _, ns := range n.Namespaces.Value {
		out := slices.ContainsFunc(n.Agent.Value.OptedOut, func(p status.OptedOutPod) bool { return p.UID == ns.PodUID })
		switch {
		case ns.Mesh == "" || out:
		case ns.PodUID == "" && len(n.Agent.Value.OptedOut) > 0:
			unknown = append(unknown, ns.String())
		default:
			in = append(in, fmt.Sprintf("%s (%s)", ns, ns.Mesh))
		}
	}
	var found []Finding
	if len(in) > 0 {
		found = append(found, warning("a mesh gets the endpoint's address instead of the Service's, and may let pass what it is to refuse, in: "+status.ListText(in),
			"Opt these pods out of translation at sockets. (Where the Services that they use have opted out, nothing is left to do.)")...)
	}
	if len(unknown) > 0 {
		found = append(found, warning("a mesh redirects connections in these, of which is not known whether they have opted out: "+status.ListText(unknown),
			"Run the doctor as root of the node, or with SYS_PTRACE in its PID namespace.")...)
	}
	if len(found) > 0 {
		return found
	}

	return ok("no pod is seen whose mesh would not know a Service")
}

// checkFirewall reports rules that match packets to Services only as long as netfilter sees these
// before they are translated, and rules that match them only afterwards.
func checkFirewall(n Node) []Finding {
	var findings []Finding
	var before, after []string
	for _, rule := range n.Netfilter.Value.Rules {
		switch {
		case rule.Does == node.MarksConnections:
		case !rule.Original && n.isBehindNode(rule.Destination):
			after = append(after, rule.String())
		case n.mayMatchService(rule.Match):
			before = append(before, rule.String())
		}
	}
	if len(before) > 0 {
		findings = append(findings, warning("these rules will not match packets to Services: "+status.ListText(before),
			"Use loadBalancerSourceRanges, nodePortAddresses or a NetworkPolicy instead, or match the mark that sluice agent --mark sets.")...)
	}
	if len(after) > 0 {
		findings = append(findings, warning("these rules will match packets to Services, if a backend has the address: "+status.ListText(after),
			"If Services lead there, take the rules away, or accept before them what has the mark that sluice agent --mark sets.")...)
	}
	if len(findings) > 0 {
		return findings
	}

	return ok("no rule before kube-proxy's selects node ports or addresses of Services")
}

// isBehindNode reports whether a destination is in a network that only this node leads to, by a bridge or a device of a
// pod: then it may be the address of a backend, and is none of a Service.
func (n Node) isBehindNode(to netip.Prefix) bool {
	return to.IsValid() && to.Bits() > 0 && slices.ContainsFunc(n.Devices.Value, func(d Device) bool {
		return (d.Kind == "bridge" || d.Class == node.ClassPods) && d.Network.IsValid() && d.Network.Overlaps(to)
	})
}

// mayMatchService reports whether the destination may be that of a Service: a node port, or an
// address that is neither the node's own nor outside of what Services have.
func (n Node) mayMatchService(m node.Match) bool {
	if m.Original {
		return true
	}
	for _, p := range m.Ports {
		if p.Low <= node.NodePorts.High && p.High >= node.NodePorts.Low {
			return true
		}
	}
	to := m.Destination
	if !to.IsValid() || to.Bits() == 0 {
		return false
	}
	addr := to.Addr()
	if addr.IsLoopback() || addr.IsMulticast() || addr.IsLinkLocalUnicast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return false
	}
	own := slices.Contains(n.Addresses, addr)

	return !own || m.Ports == nil // any port of the node, also a node port
}

func checkConnectionMarks(n Node) []Finding {
	var found []string
	for _, rule := range n.Netfilter.Value.Rules {
		if rule.Does == node.MarksConnections {
			found = append(found, rule.String())
		}
	}
	if len(found) > 0 && len(n.MarkRules.Value) > 0 {
		return warning(fmt.Sprintf("the CNI marks connections, and routing rule %d selects by a mark: %s", n.MarkRules.Value[0], status.ListText(found)),
			"Answers leave by the device that the client came by without these; if other routes depend on the mark, let sluice agent --mark set it.")
	}
	if len(n.MarkRules.Value) > 0 {
		return ok("routing rule %d selects by a mark; packets to other nodes pass the network stack", n.MarkRules.Value[0])
	}

	return ok("no route depends on the mark of a connection")
}
