package model

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/maps"
)

// programs answers from the maps as the programs in bpf/ do: dial is sock.c, come
// is tc.c. Nothing is written; what cannot be is a panic (see wrong).
type programs struct {
	*maps.Fakes
	options options
	ranges  map[uint32][]maps.SourceRangeKey // by service port id
	names   map[uint32]string                // of service ports, by id
	locals  []maps.CIDRKey
}

// wrong is a state of the maps in which no program can answer.
type wrong string

// openPrograms looks at the maps as they are now.
func openPrograms(f *maps.Fakes, o options) *programs {
	p := &programs{Fakes: f, options: o, ranges: map[uint32][]maps.SourceRangeKey{}, names: map[uint32]string{}}
	for id, sp := range f.ServicePorts.Entries {
		p.names[id] = portText(sp)
	}
	for k := range f.SourceRanges.Entries {
		p.ranges[k.ServicePortId] = append(p.ranges[k.ServicePortId], k)
	}
	for k := range f.LocalCIDRs.Entries {
		p.locals = append(p.locals, k)
	}
	return p
}

// answer is the outcome of a packet.
func (m *programs) answer(p packet) answer {
	if p.path == nodeSocket || p.path == podSocket {
		return m.dial(p)
	}
	a := m.come(p)
	if a.verdict != untouched && m.isNoClient(p.src) {
		return answer{verdict: drop}
	}
	return a
}

// isNoClient is is_no_client in lib/open.h, of an address at every port.
func (m *programs) isNoClient(src netip.Addr) bool {
	of := maps.FrontendKey{Addr: maps.AddrOf(src), Scope: maps.ScopeExternal}
	_, isClusterIP := m.lookup(of)
	return isClusterIP && m.Addrs.Entries[of.Addr].Flags&maps.AddrNode == 0
}

// dial is resolve_connect in sock.c.
func (m *programs) dial(p packet) answer {
	key := keyOfPacket(p, maps.ScopeInternal)
	pool, found := m.lookup(key)
	if !found && m.hasNodePorts(p, key.Addr) {
		pool, found = m.nodePort(key)
	}
	if !found {
		return m.whyNoFrontend(key)
	}
	if !m.admitsSocket(p, pool) {
		return answer{verdict: drop}
	}
	return m.pick(p, pool)
}

func (m *programs) hasNodePorts(p packet, dst maps.Addr) bool {
	if p.dst.IsLoopback() {
		return m.options.loopbackNodePorts && p.path == nodeSocket
	}
	return m.Addrs.Entries[dst].Flags&maps.AddrNodePort != 0
}

// admitsSocket is check_source in lib/sock.h.
func (m *programs) admitsSocket(p packet, pool maps.Pool) bool {
	if pool.Flags&maps.PoolSourceRanges == 0 {
		return true
	}
	if p.unbound && p.path == nodeSocket {
		return pool.Flags&maps.PoolNodeInRanges != 0
	}
	return m.isInRanges(pool, p.src)
}

// lookup follows a frontend to its pool, as lookup_frontend in sock.c does.
func (m *programs) lookup(key maps.FrontendKey) (maps.Pool, bool) {
	id, found := m.FrontendIDs.Entries[key]
	if !found {
		return maps.Pool{}, false
	}
	fe := m.Frontends.Get(id)
	if fe.Key != key {
		panic(wrong(fmt.Sprintf("the id of frontend %s leads to %s", key.AddrPort(), fe.Key.AddrPort())))
	}
	pool := m.Pools.Get(fe.PoolId)
	if fe.PoolId == 0 || pool.ServicePortId == 0 {
		panic(wrong(fmt.Sprintf("frontend %s leads to no pool: %d", key.AddrPort(), fe.PoolId)))
	}
	return pool, true
}

// come is may_be_for_service in tc.c and begin_flow in lib/open.h.
func (m *programs) come(p packet) answer {
	key := keyOfPacket(p, m.scopeOf(p))
	use, known := m.Addrs.Entries[key.Addr]
	if known && !m.AddrFilter.May(key.Addr) {
		panic(wrong(fmt.Sprintf("%s is in addrs, and not in the filter", key.Addr.IP())))
	}
	if !known && !m.isServiceCIDR(key.Addr) {
		return answer{verdict: untouched}
	}
	pool, found := maps.Pool{}, false
	if p.port != 0 && use.Flags&maps.AddrService != 0 {
		pool, found = m.lookup(key)
	}
	if !found && p.port != 0 && use.Flags&maps.AddrNodePort != 0 {
		pool, found = m.nodePort(key)
	}
	switch {
	case !found && use.Flags&maps.AddrNode != 0:
		return answer{verdict: untouched}
	case !found:
		return m.whyNoFrontend(key)
	case pool.Flags&maps.PoolSourceRanges != 0 && !m.isInRanges(pool, p.src):
		return answer{verdict: drop}
	}
	return m.pick(p, pool)
}

func (m *programs) scopeOf(p packet) uint8 {
	isPod := m.options.detect == byDevice || covers(m.locals, maps.AddrOf(p.src))
	if p.path == podDevice && isPod {
		return maps.ScopeInternal
	}
	return maps.ScopeExternal
}

func (m *programs) nodePort(key maps.FrontendKey) (maps.Pool, bool) {
	any := netip.IPv6Unspecified()
	if key.Addr.IP().Is4() {
		any = netip.IPv4Unspecified()
	}
	key.Addr = maps.AddrOf(any)
	return m.lookup(key)
}

func (m *programs) whyNoFrontend(key maps.FrontendKey) answer {
	all := key
	all.Port, all.Proto = 0, 0
	if _, isClusterIP := m.lookup(all); isClusterIP {
		return answer{verdict: reject}
	}
	if m.isServiceCIDR(key.Addr) {
		return answer{verdict: drop}
	}
	return answer{verdict: untouched}
}

// pick is pick_backend: all that it may choose.
func (m *programs) pick(p packet, pool maps.Pool) answer {
	if pool.SlotCount == 0 {
		if pool.Flags&maps.PoolDropIfEmpty != 0 {
			return answer{verdict: drop}
		}
		return answer{verdict: reject}
	}
	a := answer{verdict: balance, port: m.names[pool.ServicePortId], affinity: int32(pool.AffinitySeconds), algorithm: algorithmText(pool.Algorithm)}
	for _, id := range m.choices(pool) {
		be, there := m.BackendOf(id)
		if !there || be.ServicePortId != pool.ServicePortId {
			panic(wrong(fmt.Sprintf("%s: backend %d is missing or another's", a.port, id)))
		}
		a.targets = append(a.targets, m.target(p, pool, be))
	}
	slices.SortFunc(a.targets, target.compare)
	return a
}

// choices are the backend ids that a new flow may get. Clients are remembered by
// them, so slots must be in order (has_slot); what a table has must be in them.
func (m *programs) choices(pool maps.Pool) []uint32 {
	ids := m.slots(pool.SlotBase, pool.SlotCount)
	if !slices.IsSorted(ids) {
		panic(wrong(fmt.Sprintf("slots %d+%d are out of order: %v", pool.SlotBase, pool.SlotCount, ids)))
	}
	if pool.Algorithm < maps.AlgorithmSH {
		return ids
	}
	table := m.slots(pool.TableBase, pool.TableSize)
	slices.Sort(table)
	if table = slices.Compact(table); !slices.Equal(table, ids) {
		panic(wrong(fmt.Sprintf("a table of %d has %v, the slots have %v", pool.TableSize, table, ids)))
	}
	return table
}

func (m *programs) slots(base, count uint32) []uint32 {
	var ids []uint32
	for i := range count {
		ids = append(ids, m.Slots.Get(base+i))
	}
	return ids
}

// target is wants_masquerade in open.h; sockets have no such thing.
func (m *programs) target(p packet, pool maps.Pool, be maps.Backend) target {
	t := target{
		at:          be.AddrPort(),
		local:       be.Flags&maps.BackendLocal != 0,
		terminating: be.Flags&maps.BackendTerminating != 0,
	}
	if p.path == podDevice || p.path == uplink {
		remote := !t.local && p.path == uplink
		hairpin := t.at.Addr() == p.src
		t.masquerade = (remote || hairpin || pool.Flags&maps.PoolMasquerade != 0) &&
			m.Addrs.Entries[be.Addr].Flags&maps.AddrNode == 0
	}
	return t
}

func (m *programs) isInRanges(pool maps.Pool, src netip.Addr) bool {
	return slices.ContainsFunc(m.ranges[pool.ServicePortId], func(k maps.SourceRangeKey) bool {
		return hasPrefix(maps.AddrOf(src), k.Addr, int(k.PrefixLen)-32)
	})
}

// isServiceCIDR is is_service_cidr in lib/addr.h: the longest prefix decides.
func (m *programs) isServiceCIDR(ip maps.Addr) bool {
	longest, use := -1, uint32(0)
	for k, v := range m.ServiceCIDRs.Entries {
		if bits := int(k.PrefixLen); bits > longest && hasPrefix(ip, k.Addr, bits) {
			longest, use = bits, v
		}
	}
	if use != maps.CIDROfServices {
		return false
	}
	if !m.CIDRCovers.May(ip) {
		panic(wrong(fmt.Sprintf("%s is in a Service CIDR, and not covered", ip.IP())))
	}
	return true
}

func covers(cidrs []maps.CIDRKey, ip maps.Addr) bool {
	return slices.ContainsFunc(cidrs, func(k maps.CIDRKey) bool { return hasPrefix(ip, k.Addr, int(k.PrefixLen)) })
}

func hasPrefix(ip, prefix maps.Addr, bits int) bool {
	whole, rest := bits/8, bits%8
	if !bytes.Equal(ip.Bytes[:whole], prefix.Bytes[:whole]) {
		return false
	}
	return rest == 0 || (ip.Bytes[whole]^prefix.Bytes[whole])>>(8-rest) == 0
}

func keyOfPacket(p packet, scope uint8) maps.FrontendKey {
	return maps.FrontendKeyOf(p.dst, uint16(p.port), protocolNumbers[p.protocol], scope)
}

// icmp stands for protocols that no Service can have.
const icmp corev1.Protocol = "ICMP"

var protocolNumbers = map[corev1.Protocol]uint8{corev1.ProtocolTCP: 6, corev1.ProtocolUDP: 17, corev1.ProtocolSCTP: 132, icmp: 1}

func portText(sp maps.ServicePort) string {
	protocol := map[uint8]string{6: "TCP", 17: "UDP", 132: "SCTP"}[sp.Proto]
	return fmt.Sprintf("%s %s IPv%d", sp, protocol, sp.Family)
}

func algorithmText(a uint8) string {
	if int(a) < len(algorithms) {
		return algorithms[a]
	}
	return fmt.Sprintf("algorithm %d", a)
}

// clientPort is the packets' source port; no Service has it as its NodePort.
func clientPort(number int) uint16 { return uint16(40000 + number%20000) }

// frame is a packet as the first one of a flow, from a client's port to a device.
func (p packet) frame(from uint16, device net.HardwareAddr) ([]byte, error) {
	transport, number := p.transport(from)
	ether := &layers.Ethernet{SrcMAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, DstMAC: device, EthernetType: layers.EthernetTypeIPv4}
	var network gopacket.SerializableLayer
	if p.dst.Is4() {
		network = &layers.IPv4{Version: 4, TTL: 64, Protocol: number, SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice()}
	} else {
		ether.EthernetType = layers.EthernetTypeIPv6
		network = &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: number, SrcIP: p.src.AsSlice(), DstIP: p.dst.AsSlice()}
	}
	if summed, ok := transport[0].(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		if err := summed.SetNetworkLayerForChecksum(network.(gopacket.NetworkLayer)); err != nil {
			return nil, err
		}
	}
	buffer := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	err := gopacket.SerializeLayers(buffer, options, append([]gopacket.SerializableLayer{ether, network}, transport...)...)
	return buffer.Bytes(), err
}

func (p packet) transport(from uint16) ([]gopacket.SerializableLayer, layers.IPProtocol) {
	body := gopacket.Payload("sixteen bytes...")
	switch {
	case p.protocol == corev1.ProtocolTCP:
		return []gopacket.SerializableLayer{&layers.TCP{SrcPort: layers.TCPPort(from), DstPort: layers.TCPPort(p.port), SYN: true, Window: 1000}}, layers.IPProtocolTCP
	case p.protocol == corev1.ProtocolUDP:
		return []gopacket.SerializableLayer{&layers.UDP{SrcPort: layers.UDPPort(from), DstPort: layers.UDPPort(p.port)}, body}, layers.IPProtocolUDP
	case p.protocol == corev1.ProtocolSCTP:
		init := &layers.SCTPInit{SCTPChunk: layers.SCTPChunk{Type: layers.SCTPChunkTypeInit}, InitiateTag: 1, AdvertisedReceiverWindowCredit: 1500, OutboundStreams: 1, InboundStreams: 1}
		return []gopacket.SerializableLayer{&layers.SCTP{SrcPort: layers.SCTPPort(from), DstPort: layers.SCTPPort(p.port)}, init}, layers.IPProtocolSCTP
	case p.dst.Is4():
		return []gopacket.SerializableLayer{&layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(8, 0), Id: from}, body}, layers.IPProtocolICMPv4
	}
	return []gopacket.SerializableLayer{&layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(128, 0)}, &layers.ICMPv6Echo{Identifier: from}, body}, layers.IPProtocolICMPv6
}

// destination is where a frame goes.
func destination(frame []byte) netip.AddrPort {
	packet := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.NoCopy)
	var ip netip.Addr
	if network := packet.NetworkLayer(); network != nil {
		ip, _ = netip.AddrFromSlice(network.NetworkFlow().Dst().Raw())
	}
	var port uint16
	if transport := packet.TransportLayer(); transport != nil {
		raw := transport.TransportFlow().Dst().Raw()
		port = uint16(raw[0])<<8 | uint16(raw[1])
	}
	return netip.AddrPortFrom(ip, port)
}
