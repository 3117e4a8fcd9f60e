package node

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// ModelConfig configures a [Model].
type ModelConfig struct {
	// NodeName is the name of this node's Node object. NodeOptional is set if there need be none.
	NodeName          string
	NodeOptional      bool
	NodePortAddresses lb.NodePortAddresses
	// HadNodePorts are the addresses on which node ports answered when the agent
	// started. They keep answering until it is known which address is primary.
	HadNodePorts map[netip.Addr]bool
	// HadClientIPs are the addresses by which the node's own processes were clients when the
	// agent started. They are it until the Node object is known.
	HadClientIPs []netip.Addr
	// NodeIP takes the place of the Node's primary address of its family, and
	// makes that family the first one. The zero value leaves it to the Node.
	NodeIP  netip.Addr
	Devices Rules
	Local   LocalDetector
	// ThroughStack is why packets to backends on other nodes always pass the network stack, "" if
	// that depends on the [State].
	ThroughStack string
	// UDPAtDevices is set if sockets of pods are not translated over UDP (--udp=off).
	UDPAtDevices bool
	// NoLocalhostNodePorts are the families of which node ports do not answer on loopback addresses.
	NoLocalhostNodePorts []lb.Family
}

// Model is what is known of this node, from the kernel and from its Node object, and what
// follows from that for the maps. It has no locks: one goroutine owns it.
type Model struct {
	cfg ModelConfig

	received bool           // whether the Node object exists is known
	exists   bool           // the Node object does
	existed  bool           // it does, or did
	ips      []netip.Addr   // its own, at most one a family
	podCIDRs []netip.Prefix // its own
	// awaitsObject is set while the Node object may still arrive.
	awaitsObject bool

	state State // Addresses is nil: not known yet

	addrsChanged, devicesChanged, localCIDRsChanged, unmetChanged bool
}

// NewModel returns a model of a node of which nothing is known yet.
func NewModel(cfg ModelConfig) *Model {
	// If no ranges are received, those of an earlier agent have to go.
	return &Model{cfg: cfg, awaitsObject: true, localCIDRsChanged: true}
}

// SetObject follows the Node object: its primary addresses, its podCIDRs, and whether it exists.
// Those that it had stay in force if it has none any more: if it is gone, or loses them for a moment,
// node ports must not open on every address, and its pods must not count as external clients.
func (m *Model) SetObject(ips []netip.Addr, podCIDRs []netip.Prefix, exists bool) {
	ips = withOtherFamilies(ips, m.ips)
	m.devicesChanged = m.devicesChanged || !m.received && exists || !slices.Equal(ips, m.ips)
	m.received, m.exists, m.existed = m.received || exists, exists, m.existed || exists
	m.ips, m.addrsChanged, m.unmetChanged = ips, true, true
	if len(podCIDRs) > 0 && !slices.Equal(podCIDRs, m.podCIDRs) {
		m.podCIDRs, m.localCIDRsChanged = podCIDRs, true
	}
}

// ObjectReceived stops waiting for the Node object if the cluster has none of this name: it is known now whether it
// has.
func (m *Model) ObjectReceived() {
	m.received, m.devicesChanged, m.unmetChanged = true, true, true
	if !m.exists {
		m.StopWaiting()
	}
}

// StopWaiting has node ports and ranges of pods follow from what is known of the Node object now.
func (m *Model) StopWaiting() {
	m.awaitsObject, m.addrsChanged, m.devicesChanged, m.unmetChanged = false, true, true, true
}

// SetState follows the kernel.
func (m *Model) SetState(state State) {
	m.state, m.addrsChanged, m.devicesChanged, m.unmetChanged = state, true, true, true
}

// HasState reports whether the state of the kernel is known.
func (m *Model) HasState() bool { return m.state.Addresses != nil }

// PrimaryIPs returns the node's primary addresses, one of a family at most.
func (m *Model) PrimaryIPs() []netip.Addr {
	if !m.cfg.NodeIP.IsValid() {
		return m.ips
	}

	return withOtherFamilies([]netip.Addr{m.cfg.NodeIP}, m.ips)
}

// clientIPs returns the addresses by which the node's own processes are clients of Services, one of a family
// at most: the primary ones, or else the first of a device.
func (m *Model) clientIPs() []netip.Addr {
	ips := m.PrimaryIPs()
	if m.awaitsObject && !m.received {
		ips = withOtherFamilies(ips, m.cfg.HadClientIPs)
	}
	for _, d := range m.state.Devices {
		sources := []netip.Addr{d.SourceV4, d.SourceV6}
		ips = withOtherFamilies(ips, slices.DeleteFunc(sources, func(a netip.Addr) bool { return !a.IsValid() || a.IsLoopback() }))
	}

	return ips
}

// PodCIDRs returns those of the Node object.
func (m *Model) PodCIDRs() []netip.Prefix { return m.podCIDRs }

// AwaitsIPs reports whether no primary address is known, and the Node object that has them may still arrive.
func (m *Model) AwaitsIPs() bool { return m.awaitsObject && len(m.PrimaryIPs()) == 0 }

// awaitsPrimary reports whether node ports answer on the primary address, and the
// Node object that has it may still arrive.
func (m *Model) awaitsPrimary() bool {
	return m.cfg.NodePortAddresses.NeedPrimary() && m.awaitsObject && len(m.ips) == 0
}

// NewAddrs returns the addresses of this node, and on which of them node
// ports answer ([maps.AddrNodePort]), if that may have changed.
func (m *Model) NewAddrs() (map[netip.Addr]maps.AddrUse, bool) {
	if !m.addrsChanged || !m.HasState() {
		return nil, false
	}
	m.addrsChanged = false

	addrs := make(map[netip.Addr]maps.AddrUse, len(m.state.Addresses))
	local := make([]netip.Addr, 0, len(m.state.Addresses))
	for _, a := range m.state.Addresses {
		local = append(local, a.Addr)
		addrs[a.Addr] = maps.AddrUse{Ifindex: uint32(a.IfIndex)}
	}
	selected := m.cfg.NodePortAddresses.Select(local, m.PrimaryIPs())
	if m.awaitsPrimary() {
		selected = slices.DeleteFunc(local, func(a netip.Addr) bool {
			return !m.cfg.HadNodePorts[a] && (a.IsLoopback() || !m.cfg.NodePortAddresses.Contains(a))
		})
	}
	for _, a := range selected {
		entry := addrs[a]
		entry.Flags |= maps.AddrNodePort
		addrs[a] = entry
	}

	return addrs, true
}

// CheckAddrs returns the addresses on which health check node ports answer, which are those
// of node ports, and false if they are not known yet. The unspecified address stands for all of a
// family. There is none of a family that the node does not have.
func (m *Model) CheckAddrs() ([]netip.Addr, bool) {
	addrs, primary := []netip.Addr{}, m.PrimaryIPs()
	for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		family := lb.FamilyOf(all)
		every := m.cfg.NodePortAddresses.All(family, primary)
		for _, a := range m.state.Addresses {
			addr := a.Addr
			if lb.FamilyOf(addr) != family {
				continue
			}
			if every {
				addrs = append(addrs, all)

				break
			}
			named := addr.IsLoopback() && m.cfg.NodePortAddresses.Contains(addr)
			if !named && len(m.cfg.NodePortAddresses.Select([]netip.Addr{addr}, primary)) == 0 {
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

	return addrs, !m.awaitsPrimary()
}

// NewLocalCIDRs returns the ranges of this node's pods, if they are known and may have
// changed. There are none if pods are not detected by their address. Of each family kube-proxy
// uses the first range.
func (m *Model) NewLocalCIDRs() ([]netip.Prefix, bool) {
	mode := m.cfg.Local.Mode
	unsure := mode == LocalNodeCIDR && m.awaitsObject && len(m.podCIDRs) == 0
	if !m.localCIDRsChanged || unsure {
		return nil, false
	}
	m.localCIDRsChanged = false
	switch mode {
	case LocalClusterCIDR:
		return firstOfEachFamily(m.cfg.Local.ClusterCIDRs), true
	case LocalNodeCIDR:
		return firstOfEachFamily(m.podCIDRs), true
	}

	return nil, true
}

// ThroughStack returns why packets to backends on other nodes have to pass the network stack, or
// "" if they need not.
func (m *Model) ThroughStack() string {
	return cmp.Or(m.cfg.ThroughStack, m.state.Concern, bypassedAt(Decide(m.state.Devices, m.cfg.Devices)))
}

// bypassedAt returns what would miss packets that leave again where they arrive, or "".
func bypassedAt(decisions []Decision) string {
	for _, d := range decisions {
		if d.turns() && d.Bypassed != "" {
			return fmt.Sprintf("%q runs at the ingress of %s", d.Bypassed, d.Name)
		}
	}

	return ""
}

// NewDecisions returns the class of every device, and the entries of the devices map, which are those of devices
// and the node's own, if one may have changed. Unless [Model.ThroughStack] returns why not, packets may leave by uplinks without
// passing the network stack.
func (m *Model) NewDecisions() ([]Decision, map[uint32]maps.Device, bool) {
	if !m.devicesChanged || !m.HasState() {
		return nil, nil, false
	}
	m.devicesChanged = false
	decisions := Decide(m.state.Devices, m.cfg.Devices)

	entries := entriesOf(decisions, m.ThroughStack() == "", m.state.Encrypts)
	entries[maps.DeviceOfNode] = nodeEntry(m.clientIPs())

	return decisions, entries, true
}

// nodeEntry is the entry of the node itself.
func nodeEntry(clientIPs []netip.Addr) (entry maps.Device) {
	for _, ip := range clientIPs {
		if ip.Is4() {
			entry.SourceV4 = maps.AddrOf(ip)
		} else {
			entry.SourceV6 = maps.AddrOf(ip)
		}
	}

	return entry
}

func entriesOf(decisions []Decision, turns, encrypts bool) map[uint32]maps.Device {
	entries := make(map[uint32]maps.Device, len(decisions))
	seen := make(map[int]bool) // by index: programs are attached to it, or to a port of it
	for _, d := range decisions {
		if d.Class != ClassNone {
			seen[d.Index], seen[d.Bridge] = true, true
		}
	}
	for _, d := range decisions {
		entry := maps.Device{
			SourceV4: maps.AddrOf(d.SourceV4), SourceV6: maps.AddrOf(d.SourceV6), // zero if they are invalid
			Bridge: uint32(d.Bridge), PeerNetns: d.PeerNetns,
		}
		if turns && d.Class == ClassUplink && d.TakesFrames {
			entry.Flags = maps.DeviceTurns
		}
		if d.LeadsOut {
			entry.Flags |= maps.DeviceLeadsOut
		} else if !seen[d.Index] {
			entry.Flags |= maps.DeviceUnseen
		}
		if encrypts {
			entry.Flags |= maps.DeviceEncrypts
		}
		if d.Above {
			entry.Flags |= maps.DeviceAbove
		}
		entries[uint32(d.Index)] = entry
	}

	return entries
}

// firstOfEachFamily returns the first prefix of each family.
func firstOfEachFamily(prefixes []netip.Prefix) []netip.Prefix {
	var first []netip.Prefix
	for _, p := range prefixes {
		sameFamily := func(q netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == lb.FamilyOf(q.Addr()) }
		if !slices.ContainsFunc(first, sameFamily) {
			first = append(first, p)
		}
	}

	return first
}

// withOtherFamilies returns ips, and those of others that are of another family.
func withOtherFamilies(ips, others []netip.Addr) []netip.Addr {
	all := slices.Clone(ips)
	for _, other := range others {
		sameFamily := func(ip netip.Addr) bool { return lb.FamilyOf(ip) == lb.FamilyOf(other) }
		if !slices.ContainsFunc(ips, sameFamily) {
			all = append(all, other)
		}
	}

	return all
}
