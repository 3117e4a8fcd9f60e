// Package maps is the map ABI between the agent and the datapath: every map, and every byte that
// both sides share. C owns the layout (maps.h, types.h and the headers beside it), this package owns
// the names.
package maps

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"strings"
)

// The types of keys and values. Ports in them are in network byte order: see [Port] and the constructors below.
type (
	Addr           = abiAddr
	FrontendKey    = abiFrontendKey
	Frontend       = abiFrontend
	Pool           = abiPool
	Backend        = abiBackend
	ServicePort    = abiServicePort
	AddrUse        = abiAddrUse
	Device         = abiDevice
	SourceRangeKey = abiSourceRangeKey
	CIDRKey        = abiCidrKey
	PodUID         = abiPodUid
	AffinityKey    = abiAffinityKey
	Affinity       = abiAffinity
	SockState      = abiSockState
	UDPPinKey      = abiUdpPinKey
	UDPPin         = abiUdpPin
	FlowKey        = abiFlowKey
	Flow           = abiFlow
	// TranslatedSock is a socket that was translated, and one of its destinations, as the iterators
	// over sock_state and udp_dials return it. It is in no map.
	TranslatedSock = abiTranslatedSock
)

// The scopes of a lookup.
const (
	ScopeInternal = uint8(abiScopeSCOPE_INTERNAL)
	ScopeExternal = uint8(abiScopeSCOPE_EXTERNAL)
)

// The kinds of addresses of a [Frontend].
const (
	KindClusterIP    = uint8(abiKindKIND_CLUSTER_IP)
	KindExternalIP   = uint8(abiKindKIND_EXTERNAL_IP)
	KindLoadBalancer = uint8(abiKindKIND_LOAD_BALANCER)
	KindNodePort     = uint8(abiKindKIND_NODE_PORT)
)

// The algorithms of a [Pool].
const (
	AlgorithmRandom = uint8(abiAlgorithmALGORITHM_RANDOM)
	AlgorithmRR     = uint8(abiAlgorithmALGORITHM_RR)
	AlgorithmLC     = uint8(abiAlgorithmALGORITHM_LC)
	AlgorithmSED    = uint8(abiAlgorithmALGORITHM_SED)
	AlgorithmNQ     = uint8(abiAlgorithmALGORITHM_NQ)
	AlgorithmSH     = uint8(abiAlgorithmALGORITHM_SH)
	AlgorithmDH     = uint8(abiAlgorithmALGORITHM_DH)
	AlgorithmMaglev = uint8(abiAlgorithmALGORITHM_MAGLEV)
)

// Hashes reports whether an algorithm uses the table of the pool.
func Hashes(algorithm uint8) bool {
	return algorithm == AlgorithmSH || algorithm == AlgorithmDH || algorithm == AlgorithmMaglev
}

// Flags of a [Pool].
const (
	PoolDropIfEmpty  = uint16(abiPoolFlagPOOL_DROP_IF_EMPTY)
	PoolSourceRanges = uint16(abiPoolFlagPOOL_SOURCE_RANGES)
	PoolNodeInRanges = uint16(abiPoolFlagPOOL_NODE_IN_RANGES)
	PoolMasquerade   = uint16(abiPoolFlagPOOL_MASQUERADE)
	PoolOptedOut     = uint16(abiPoolFlagPOOL_OPTED_OUT)
	PoolPassIfEmpty  = uint16(abiPoolFlagPOOL_PASS_IF_EMPTY)
	PoolNoEject      = uint16(abiPoolFlagPOOL_NO_EJECT)
	PoolNoResteer    = uint16(abiPoolFlagPOOL_NO_RESTEER)
)

// Flags of a [Backend].
const (
	BackendLocal       = uint32(abiBackendFlagBACKEND_LOCAL)
	BackendTerminating = uint32(abiBackendFlagBACKEND_TERMINATING)
)

// Flags of an [AddrUse].
const (
	AddrNode     = uint32(abiAddrFlagADDR_NODE)
	AddrNodePort = uint32(abiAddrFlagADDR_NODE_PORT)
	AddrService  = uint32(abiAddrFlagADDR_SERVICE)
	AddrLeft     = uint32(abiAddrFlagADDR_LEFT)
)

// What ServiceCIDRs of [Tables] says of a prefix. The longest one that contains an address counts.
const (
	CIDROfServices   = uint32(abiCidrUseCIDR_OF_SERVICES)
	CIDROfOtherProxy = uint32(abiCidrUseCIDR_OF_OTHER_PROXY)
)

// The kinds of clients in an [AffinityKey].
const (
	ClientNetns = uint32(abiClientKindCLIENT_NETNS)
	ClientAddr  = uint32(abiClientKindCLIENT_ADDR)
)

// UDPPinSend is the direction of a [UDPPin] that is looked up when a socket sends.
const UDPPinSend = uint16(abiUdpPinWayUDP_PIN_SEND)

// IndexBits is the number of bits of the index in an id, see [Index].
const IndexBits = uint32(abiIdLayoutINDEX_BITS)

// MaxServicePorts is the number of service ports that can be counted, and can therefore have ids.
const MaxServicePorts = int(abiChunkMAX_COUNT_CHUNKS) * int(abiChunkCHUNK_COUNTS)

// The entries that frontend_ids has room for: about one for each bytesPerFrontend of the machine's memory, so that its empty
// buckets, of 16 bytes, take some half a percent of that; those of minFrontends are 8 MiB.
const (
	bytesPerFrontend = 4096
	minFrontends     = 1 << 19
	maxFrontends     = 1 << 21
)

// LeastCapacities returns the room, for [Options], of maps whose size depends on the machine's memory. In 8 GiB there is
// room for 100,000 dual-stack Services with a node port each: a Service takes 12 frontends, 4 service ports (two are for what
// reaches no port of it) and 2 addresses.
func LeastCapacities(memory uint64) map[string]uint32 {
	nearest := uint64(1) << bits.Len64(memory/bytesPerFrontend*2/3)
	frontends := uint32(min(max(nearest, minFrontends), maxFrontends))

	return map[string]uint32{NameFrontendIDs: frontends, NameAddrs: frontends / 4, NameSourceRanges: frontends / 4}
}

// Index returns the place in an array of an id of a service port or a backend. Ids with the same
// index differ in their generation.
func Index(id uint32) uint32 { return id & uint32(abiIdLayoutINDEX_MASK) }

// ID returns the id of a place in this generation, of which only the low 8 bits are used.
func ID(index, generation uint32) uint32 { return index | generation<<IndexBits }

// Generation returns the generation of an id.
func Generation(id uint32) uint32 { return id >> IndexBits }

// AddrOf returns a as in maps: IPv4 is mapped into ::ffff:0:0/96.
func AddrOf(a netip.Addr) Addr {
	return Addr{Bytes: a.As16()}
}

// IP returns the address, IPv4 unmapped.
func (a Addr) IP() netip.Addr {
	return netip.AddrFrom16(a.Bytes).Unmap()
}

// Port converts a port between host and network byte order.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)

	return binary.NativeEndian.Uint16(b[:])
}

// FrontendKeyOf returns the key of the destination addr:port. Protocol is an IP protocol number,
// scope one of the Scope constants.
func FrontendKeyOf(addr netip.Addr, port uint16, protocol, scope uint8) FrontendKey {
	return FrontendKey{Addr: AddrOf(addr), Port: Port(port), Proto: protocol, Scope: scope}
}

// AddrPort returns the address and port of k.
func (k FrontendKey) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(k.Addr.IP(), Port(k.Port))
}

// BackendOf returns the backend of a service port with this id and address. Its reserved word is
// the generation of the next backend in its place, which an agent reads when it starts.
func BackendOf(id, servicePortID uint32, addr netip.AddrPort, flags uint32) Backend {
	return Backend{
		Id:            id,
		ServicePortId: servicePortID,
		Addr:          AddrOf(addr.Addr()),
		Port:          Port(addr.Port()),
		Reserved:      uint16(Generation(id) + 1),
		Flags:         flags,
	}
}

// AddrPort returns the address and port of b.
func (b Backend) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(b.Addr.IP(), Port(b.Port))
}

// SourceRangeKeyOf returns the key that allows prefix at the frontends of a service port.
func SourceRangeKeyOf(servicePortID uint32, prefix netip.Prefix) SourceRangeKey {
	return SourceRangeKey{
		PrefixLen:     32 + mappedBits(prefix),
		ServicePortId: servicePortID,
		Addr:          AddrOf(prefix.Addr()),
	}
}

// Prefix returns the source range that k allows.
func (k SourceRangeKey) Prefix() netip.Prefix {
	return prefixOf(k.Addr, k.PrefixLen-32)
}

// CIDRKeyOf returns the key of a prefix.
func CIDRKeyOf(prefix netip.Prefix) CIDRKey {
	return CIDRKey{PrefixLen: mappedBits(prefix), Addr: AddrOf(prefix.Addr())}
}

// Prefix returns the prefix of k.
func (k CIDRKey) Prefix() netip.Prefix {
	return prefixOf(k.Addr, k.PrefixLen)
}

// mappedBits returns the length of p as a prefix of 128-bit addresses.
func mappedBits(p netip.Prefix) uint32 {
	if p.Addr().Is4() {
		return uint32(96 + p.Bits())
	}

	return uint32(p.Bits())
}

func prefixOf(a Addr, bits uint32) netip.Prefix {
	addr := a.IP()
	if addr.Is4() {
		bits -= 96
	}

	return netip.PrefixFrom(addr, int(bits))
}

// PodUIDOf returns a pod's UID as in maps, and false if the text does not have the length of one.
func PodUIDOf(text string) (uid PodUID, ok bool) {
	for i := range min(len(text), len(uid.Text)) {
		uid.Text[i] = int8(text[i])
	}

	return uid, len(text) == len(uid.Text)
}

// String returns the UID as it is in the name of a cgroup.
func (u PodUID) String() string {
	text := make([]byte, len(u.Text))
	for i, c := range u.Text {
		text[i] = byte(c)
	}

	return string(text)
}

// ServicePortOf returns the name of a service port. Kubernetes limits each part to 63 bytes;
// longer parts are cut.
func ServicePortOf(namespace, name, port string, protocol, family uint8) ServicePort {
	sp := ServicePort{Proto: protocol, Family: family}
	putString(&sp.Namespace, namespace)
	putString(&sp.Name, name)
	putString(&sp.Port, port)

	return sp
}

// Parts returns the namespace and name of the Service, and the name of its
// port (empty when it has none).
func (sp ServicePort) Parts() (namespace, name, port string) {
	return getString(&sp.Namespace), getString(&sp.Name), getString(&sp.Port)
}

// Service returns "namespace/name".
func (sp ServicePort) Service() string { return getString(&sp.Namespace) + "/" + getString(&sp.Name) }

// IsProbe reports whether it is the agent's own, by which it tries its hooks: the namespace has a dot, which
// those of a cluster have not.
func (sp ServicePort) IsProbe() bool { return strings.Contains(getString(&sp.Namespace), ".") }

// String returns "namespace/name:port", or "namespace/name" for an unnamed
// port.
func (sp ServicePort) String() string {
	if port := getString(&sp.Port); port != "" {
		return sp.Service() + ":" + port
	}

	return sp.Service()
}

// putString writes s with a NUL at its end, as in C.
func putString(to *[64]int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

func getString(from *[64]int8) string {
	b := make([]byte, 0, len(from))
	for _, c := range from {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}

	return string(b)
}
