package agent

import (
	"log/slog"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/events"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
)

// model is what the agent knows of the cluster and of the node. It belongs to the
// goroutine that has the turn.
type model struct {
	state *lb.State

	node       lb.Node
	nodeExists bool
	nodeIPs    []netip.Addr // the Node's own, at most one a family
	nodeIP     netip.Addr   // takes the place of one of them, unless it is zero
	// eligible is set while load balancers may send new connections to this node. Any
	// goroutine may read it.
	eligible *atomic.Bool

	// claimsChanged is set if an address may have got another owner since
	// [agent.reportImpaired].
	claimsChanged bool

	localAddrs        []node.Address // nil: not known yet
	nodeAddrsChanged  bool
	nodePortAddresses lb.NodePortAddresses
	// hadNodePorts are the addresses on which node ports answered when the agent
	// started. They keep answering until it is known which address is primary.
	hadNodePorts map[netip.Addr]bool
	// awaitsNode is set while the Node object may still arrive, which has the
	// primary addresses and the podCIDRs.
	awaitsNode bool

	deviceRules    node.Rules
	devices        []node.Device
	devicesChanged bool
	concern        string // why packets must not bypass the network stack

	detector          node.LocalDetector
	podCIDRs          []netip.Prefix // the Node's
	localCIDRsChanged bool

	optOuts *kube.OptOuts

	serviceCIDRs        []netip.Prefix
	serviceCIDRsChanged bool

	// problems are the parts of objects that had to be left out: by object or source
	// when they were read, and by Service when its frontends were decided.
	problems map[string][]lb.Problem
	// undecided are Services whose decision failed by a panic.
	undecided map[lb.ServiceName]struct{}
	log       *slog.Logger
	events    events.Recorder
}

func newModel(cfg Config, p parts) *model {
	self := lb.Node{
		Name: cfg.NodeName, MasqueradeAll: cfg.MasqueradeAll,
		Algorithm: cfg.Algorithm, IgnoreExternalIPs: cfg.IgnoreExternalIPs, Limits: p.limits,
	}

	self.PrimaryIPs = node.WithNodeIP(nil, cfg.NodeIP)

	return &model{
		nodeIP:            cfg.NodeIP,
		eligible:          new(atomic.Bool),
		events:            p.events,
		state:             lb.NewState(self),
		node:              self,
		nodePortAddresses: cfg.NodePortAddresses,
		hadNodePorts:      p.hadNodePorts,
		awaitsNode:        true,
		optOuts:           kube.NewOptOuts(cfg.PodOptOut),
		deviceRules:       cfg.Devices,
		detector:          cfg.Local,
		// If none are received, those of an earlier agent have to go.
		localCIDRsChanged:   true,
		serviceCIDRsChanged: true,
		problems:            map[string][]lb.Problem{},
		undecided:           map[lb.ServiceName]struct{}{},
		log:                 cfg.Log,
	}
}

func (m *model) setNode(n kube.Node) {
	m.nodeIPs = node.LastingIPs(n.PrimaryIPs, m.nodeIPs)
	n.PrimaryIPs = node.WithNodeIP(m.nodeIPs, m.nodeIP)
	m.eligible.Store(n.Exists && !n.Leaving)
	n.MasqueradeAll = m.node.MasqueradeAll
	n.Algorithm, n.IgnoreExternalIPs, n.Limits = m.node.Algorithm, m.node.IgnoreExternalIPs, m.node.Limits
	m.node, m.nodeExists = n.Node, n.Exists
	m.nodeAddrsChanged = true
	m.state.SetNode(n.Node)
	m.setPodCIDRs(n.PodCIDRs)
}

// setPodCIDRs follows the Node's podCIDRs. As with its addresses, the last ones stay in
// force if the Node has none any more: else its pods would count as external clients.
func (m *model) setPodCIDRs(podCIDRs []netip.Prefix) {
	if len(podCIDRs) == 0 || slices.Equal(podCIDRs, m.podCIDRs) {
		return
	}
	m.podCIDRs = podCIDRs
	m.localCIDRsChanged = true
}

// nodeReceived stops waiting for the Node if the cluster has none of this name.
func (m *model) nodeReceived() {
	if !m.nodeExists {
		m.stopWaiting()
	}
}

// stopWaiting programs node ports and pod ranges by what is known of the Node now.
func (m *model) stopWaiting() {
	m.awaitsNode = false
	m.nodeAddrsChanged = true
}

func (m *model) setLocalAddrs(addrs []node.Address) {
	m.localAddrs = addrs
	m.nodeAddrsChanged = true
}

func (m *model) setDevices(devices []node.Device) {
	m.devices = devices
	m.devicesChanged = true
}

// setConcern sets why packets must not bypass the network stack, "" if they may.
func (m *model) setConcern(concern string) {
	m.devicesChanged = m.devicesChanged || m.concern != concern
	m.concern = concern
}

// newDecisions returns the class of every device, if one may have changed.
func (m *model) newDecisions() ([]node.Decision, bool) {
	if !m.devicesChanged {
		return nil, false
	}
	m.devicesChanged = false

	return node.Decide(m.devices, m.deviceRules), true
}

// awaitsPrimary reports whether node ports answer on the primary address only, and the
// Node object that has it may still arrive.
func (m *model) awaitsPrimary() bool {
	return len(m.nodePortAddresses.Prefixes) == 0 && m.awaitsNode && len(m.nodeIPs) == 0
}

// newNodeAddrs returns the addresses of this node, and on which of them node
// ports answer ([maps.AddrNodePort]), if that may have changed.
func (m *model) newNodeAddrs() (map[netip.Addr]maps.AddrUse, bool) {
	if !m.nodeAddrsChanged || m.localAddrs == nil {
		return nil, false
	}
	m.nodeAddrsChanged = false

	addrs := make(map[netip.Addr]maps.AddrUse, len(m.localAddrs))
	local := make([]netip.Addr, 0, len(m.localAddrs))
	for _, a := range m.localAddrs {
		local = append(local, a.Addr)
		addrs[a.Addr] = maps.AddrUse{Ifindex: uint32(a.IfIndex)}
	}
	selected := m.nodePortAddresses.Select(local, &m.node)
	if m.awaitsPrimary() {
		selected = slices.DeleteFunc(local, func(a netip.Addr) bool { return !m.hadNodePorts[a] })
	}
	for _, a := range selected {
		entry := addrs[a]
		entry.Flags |= maps.AddrNodePort
		addrs[a] = entry
	}

	return addrs, true
}

// newLocalCIDRs returns the ranges of this node's pods, if they are known and may have
// changed. There are none if pods are not detected by their address.
func (m *model) newLocalCIDRs() ([]netip.Prefix, bool) {
	mode := m.detector.Mode
	unsure := mode == node.LocalNodeCIDR && m.awaitsNode && len(m.podCIDRs) == 0
	if !m.localCIDRsChanged || unsure {
		return nil, false
	}
	m.localCIDRsChanged = false
	switch mode {
	case node.LocalClusterCIDR:
		return node.FirstOfEachFamily(m.detector.ClusterCIDRs), true
	case node.LocalNodeCIDR:
		return node.FirstOfEachFamily(m.podCIDRs), true
	}

	return nil, true
}

// report replaces the problems of one source. It logs and records those that are new.
func (m *model) report(source string, problems []lb.Problem) {
	known := make(map[lb.Problem]struct{}, len(m.problems[source]))
	for _, p := range m.problems[source] {
		known[p] = struct{}{}
	}
	for _, p := range problems {
		if _, reported := known[p]; !reported {
			m.log.Warn("left out", "object", p.Object, "field", p.Field, "problem", p.Message)
			m.events.Problem(p, m.node.Name)
		}
	}
	if len(problems) == 0 {
		delete(m.problems, source)

		return
	}
	m.problems[source] = problems
}

// allProblems returns what had to be left out, sorted by source.
func (m *model) allProblems() []lb.Problem {
	all := []lb.Problem{}
	for _, source := range slices.Sorted(stdmaps.Keys(m.problems)) {
		all = append(all, m.problems[source]...)
	}

	return all
}

// checkAddrs returns the addresses on which health check node ports answer, which are those
// of node ports. The unspecified address stands for all of a family. There is none of a
// family that the node does not have.
func (m *model) checkAddrs() []netip.Addr {
	addrs := []netip.Addr{}
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		family := lb.FamilyOf(all)
		every := m.nodePortAddresses.All(family, &m.node)
		for _, a := range m.localAddrs {
			addr := a.Addr
			if lb.FamilyOf(addr) != family {
				continue
			}
			if every {
				addrs = append(addrs, all)

				break
			}
			if len(m.nodePortAddresses.Select([]netip.Addr{addr}, &m.node)) == 0 {
				continue
			}
			if addr.Is6() && addr.IsLinkLocalUnicast() {
				addr = addr.WithZone(strconv.Itoa(a.IfIndex))
			}
			if !slices.Contains(addrs, addr) {
				addrs = append(addrs, addr)
			}
		}
	}

	return addrs
}

// facts returns what a configuration has to fit, see [Config.CheckNode]. The primary family is IPv4 if it is not known.
func (m *model) facts() config.Node {
	facts := config.Node{Families: node.Families(), Primary: lb.IPv4, IPs: m.node.PrimaryIPs, PodCIDRs: m.podCIDRs}
	if len(facts.IPs) > 0 {
		facts.Primary = lb.FamilyOf(facts.IPs[0])
	}

	return facts
}

// checkNode returns an error if the configuration does not fit the node.
func (a *agent) checkNode() error {
	// Without addresses of the Node it is not known which family is the first one.
	if a.cfg.CheckNode == nil || a.model.awaitsNode && len(a.model.node.PrimaryIPs) == 0 {
		return nil
	}

	return a.cfg.CheckNode(a.model.facts())
}

// throughStack returns why packets to backends on other nodes have to pass the network stack, or
// "" if they need not.
func throughStack(always, knowsMTU bool, concern string) string {
	switch {
	case always:
		return "--forwarding stack"
	case !knowsMTU:
		return "the kernel's lookup of routes knows no MTU (Linux 5.12)"
	default:
		return concern
	}
}

// decideForwarding decides whether packets to backends on other nodes pass the network stack, and
// logs that if it has changed.
func (a *agent) decideForwarding() {
	why := throughStack(a.cfg.ThroughStack, a.fibMTU, a.model.concern)
	if a.throughStack == nil || *a.throughStack != why {
		a.cfg.Log.Info("forwarding to backends on other nodes", "stack", why != "", "because", why)
	}
	a.throughStack = &why
}

// deviceEntries returns the entries of the devices map. With turns, packets may leave by uplinks
// without passing the network stack.
func deviceEntries(decisions []node.Decision, turns bool) map[uint32]maps.Device {
	entries := make(map[uint32]maps.Device, len(decisions))
	for _, d := range decisions {
		entry := maps.Device{Bridge: uint32(d.Bridge), PeerNetns: d.PeerNetns}
		if d.SourceV4.IsValid() {
			entry.SourceV4 = maps.AddrOf(d.SourceV4)
		}
		if d.SourceV6.IsValid() {
			entry.SourceV6 = maps.AddrOf(d.SourceV6)
		}
		if turns && d.Class == node.ClassUplink && d.TakesFrames {
			entry.Flags = maps.DeviceTurns
		}
		entries[uint32(d.Index)] = entry
	}

	return entries
}
