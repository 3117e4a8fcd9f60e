// Package maps is the treaty between the agent and the datapath: every map,
// and every byte that both sides touch. C owns the layout (types.h, maps.h),
// this package owns the names.
package maps

import (
	"encoding/binary"
	"net/netip"
)

// The types that maps hold. Ports in them are in network byte order: see
// [Port] and the constructors below.
type (
	Addr           = treatyAddr
	FrontendKey    = treatyFrontendKey
	Frontend       = treatyFrontend
	Backend        = treatyBackend
	ServicePort    = treatyServicePort
	AddrUse        = treatyAddrUse
	Device         = treatyDevice
	SourceRangeKey = treatySourceRangeKey
	CIDRKey        = treatyCidrKey
	AffinityKey    = treatyAffinityKey
	Affinity       = treatyAffinity
	SockState      = treatySockState
	UDPPinKey      = treatyUdpPinKey
	UDPPin         = treatyUdpPin
	FlowKey        = treatyFlowKey
	Flow           = treatyFlow
	// TranslatedSock is a connected UDP socket that Sluice translated, as the
	// iterator over sock_state tells it. It is in no map.
	TranslatedSock = treatyTranslatedSock
)

// Where a lookup starts.
const (
	ScopeInternal = uint8(treatyScopeSCOPE_INTERNAL)
	ScopeExternal = uint8(treatyScopeSCOPE_EXTERNAL)
)

// What makes an address a frontend.
const (
	KindClusterIP    = uint8(treatyKindKIND_CLUSTER_IP)
	KindExternalIP   = uint8(treatyKindKIND_EXTERNAL_IP)
	KindLoadBalancer = uint8(treatyKindKIND_LOAD_BALANCER)
	KindNodePort     = uint8(treatyKindKIND_NODE_PORT)
)

// How a [Frontend] chooses a backend.
const (
	AlgorithmRandom = uint8(treatyAlgorithmALGORITHM_RANDOM)
	AlgorithmRR     = uint8(treatyAlgorithmALGORITHM_RR)
	AlgorithmLC     = uint8(treatyAlgorithmALGORITHM_LC)
	AlgorithmSED    = uint8(treatyAlgorithmALGORITHM_SED)
	AlgorithmNQ     = uint8(treatyAlgorithmALGORITHM_NQ)
	AlgorithmSH     = uint8(treatyAlgorithmALGORITHM_SH)
	AlgorithmDH     = uint8(treatyAlgorithmALGORITHM_DH)
	AlgorithmMaglev = uint8(treatyAlgorithmALGORITHM_MAGLEV)
)

// Flags of a [Frontend].
const (
	FrontendDropIfEmpty  = uint16(treatyFrontendFlagFRONTEND_DROP_IF_EMPTY)
	FrontendSourceRanges = uint16(treatyFrontendFlagFRONTEND_SOURCE_RANGES)
	FrontendNodeInRanges = uint16(treatyFrontendFlagFRONTEND_NODE_IN_RANGES)
	FrontendMasquerade   = uint16(treatyFrontendFlagFRONTEND_MASQUERADE)
)

// Flags of a [Backend].
const (
	BackendLocal       = uint16(treatyBackendFlagBACKEND_LOCAL)
	BackendTerminating = uint16(treatyBackendFlagBACKEND_TERMINATING)
)

// Flags of an [AddrUse].
const (
	AddrNode     = uint32(treatyAddrFlagADDR_NODE)
	AddrNodePort = uint32(treatyAddrFlagADDR_NODE_PORT)
	AddrService  = uint32(treatyAddrFlagADDR_SERVICE)
)

// What a client is, in an [AffinityKey].
const (
	ClientNetns = uint32(treatyClientKindCLIENT_NETNS)
	ClientAddr  = uint32(treatyClientKindCLIENT_ADDR)
)

// Which way a [UDPPin] is looked up.
const (
	UDPPinSend    = uint16(treatyUdpPinWayUDP_PIN_SEND)
	UDPPinReceive = uint16(treatyUdpPinWayUDP_PIN_RECEIVE)
)

// AddrOf returns a as maps hold it: IPv4 is mapped into ::ffff:0:0/96.
func AddrOf(a netip.Addr) Addr {
	return Addr{Bytes: a.As16()}
}

// IP returns the address that a stands for, IPv4 unmapped.
func (a Addr) IP() netip.Addr {
	return netip.AddrFrom16(a.Bytes).Unmap()
}

// Port converts a port between host and network byte order.
func Port(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)

	return binary.NativeEndian.Uint16(b[:])
}

// FrontendKeyOf returns the key of what a client dials at addr:port. Protocol
// is an IP protocol number, scope one of the Scope constants.
func FrontendKeyOf(addr netip.Addr, port uint16, protocol, scope uint8) FrontendKey {
	return FrontendKey{Addr: AddrOf(addr), Port: Port(port), Proto: protocol, Scope: scope}
}

// AddrPort returns the address and port of k.
func (k FrontendKey) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(k.Addr.IP(), Port(k.Port))
}

// BackendOf returns the backend of the service port frontendID that answers
// at addr.
func BackendOf(addr netip.AddrPort, frontendID uint32, flags uint16) Backend {
	return Backend{
		Addr:       AddrOf(addr.Addr()),
		Port:       Port(addr.Port()),
		FrontendId: frontendID,
		Flags:      flags,
	}
}

// AddrPort returns the address and port at which b answers.
func (b Backend) AddrPort() netip.AddrPort {
	return netip.AddrPortFrom(b.Addr.IP(), Port(b.Port))
}

// SourceRangeKeyOf returns the key that allows prefix at the frontends with
// frontendID.
func SourceRangeKeyOf(frontendID uint32, prefix netip.Prefix) SourceRangeKey {
	return SourceRangeKey{
		PrefixLen:  32 + mappedBits(prefix),
		FrontendId: frontendID,
		Addr:       AddrOf(prefix.Addr()),
	}
}

// Prefix returns the source range that k allows.
func (k SourceRangeKey) Prefix() netip.Prefix {
	return prefixOf(k.Addr, k.PrefixLen-32)
}

// CIDRKeyOf returns the key of a range of addresses.
func CIDRKeyOf(prefix netip.Prefix) CIDRKey {
	return CIDRKey{PrefixLen: mappedBits(prefix), Addr: AddrOf(prefix.Addr())}
}

// Prefix returns the range of k.
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

// ServicePortOf returns the name of a service port. Kubernetes limits each
// part to 63 bytes; what is longer is cut.
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

// String returns "namespace/name:port", or "namespace/name" for an unnamed
// port.
func (sp ServicePort) String() string {
	namespace, name, port := sp.Parts()
	if port == "" {
		return namespace + "/" + name
	}

	return namespace + "/" + name + ":" + port
}

// putString writes s with a NUL at its end, as C has it.
func putString(to *[64]int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

func getString(from *[64]int8) string {
	var b []byte
	for _, c := range from {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}

	return string(b)
}
