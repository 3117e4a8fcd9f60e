package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// Protocol is an IP protocol number. The zero value means any protocol.
type Protocol uint8

// The protocols that a Service can have.
const (
	AnyProtocol Protocol = 0
	TCP         Protocol = 6
	UDP         Protocol = 17
	SCTP        Protocol = 132
)

// ServiceName identifies a Service.
type ServiceName struct {
	Namespace string
	Name      string
}

func (n ServiceName) String() string { return n.Namespace + "/" + n.Name }

func (n ServiceName) compare(m ServiceName) int {
	return cmp.Or(strings.Compare(n.Namespace, m.Namespace), strings.Compare(n.Name, m.Name))
}

// PortName identifies one port of one Service. Endpoint ports join on it:
// name and protocol must both be equal.
type PortName struct {
	Service  ServiceName
	Port     string // empty when the Service has one unnamed port
	Protocol Protocol
}

// String returns "namespace/name:port", or "namespace/name" for an unnamed
// port. The protocol is left out, because the names of a Service's ports are unique.
func (n PortName) String() string {
	if n.Port == "" {
		return n.Service.String()
	}
	return n.Service.String() + ":" + n.Port
}

// ServiceType is the type of a Service.
type ServiceType uint8

// The types of a Service.
const (
	ClusterIP ServiceType = iota
	NodePort
	LoadBalancer
	ExternalName
)

// TrafficPolicy is which endpoints a kind of traffic may use.
type TrafficPolicy uint8

// The traffic policies. Unknown values mean Cluster.
const (
	Cluster TrafficPolicy = iota
	Local
)

// Family is an IP family.
type Family uint8

// The IP families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of addr, zero if addr is not valid. A v4-mapped
// address is IPv6 here; [ParseAddr] returns none.
func FamilyOf(addr netip.Addr) Family {
	switch {
	case addr.Is4():
		return IPv4
	case addr.Is6():
		return IPv6
	}
	return 0
}

// Service is a parsed Service object, without the fields that a Service proxy never
// reads. It holds no decisions: [Resolve] makes them.
//
// Lists of addresses hold the zero [netip.Addr] in place of text that is no address:
// [Resolve] skips it, and the indices in the problems of the others stay right.
type Service struct {
	Name    ServiceName
	Created time.Time // decides which of two Services owns an address that both claim
	Type    ServiceType

	// OtherProxy is set if another proxy serves it, by the label service.kubernetes.io/service-proxy-name.
	// It has no frontends here, and of the other fields only its ClusterIPs count.
	OtherProxy bool

	// ClusterIPs is spec.clusterIPs, or spec.clusterIP alone where
	// spec.ipFamilies is empty. A headless Service has none. Families is
	// spec.ipFamilies, index by index the family of ClusterIPs.
	ClusterIPs []netip.Addr
	Families   []Family

	ExternalIPs   []netip.Addr     // spec.externalIPs
	LoadBalancers []LoadBalancerIP // status.loadBalancer.ingress with an IP

	// SourceRanges is spec.loadBalancerSourceRanges without what could not be
	// parsed: if nothing remains, every client may connect, as in kube-proxy.
	SourceRanges []netip.Prefix

	InternalPolicy TrafficPolicy // spec.internalTrafficPolicy
	ExternalPolicy TrafficPolicy // spec.externalTrafficPolicy
	// Failover is for clients outside that have no endpoint here, if ExternalPolicy is Local.
	Failover Failover

	// Affinity is how long a client keeps its backend after its last new flow, at all
	// addresses of the service port together; zero is no session affinity.
	Affinity time.Duration

	// Algorithm is the one by which its frontends choose a backend.
	Algorithm Algorithm

	// OptedOut leaves sockets of pods alone: devices translate their packets.
	OptedOut bool

	// Healing limits what is done about backends that do not answer.
	Healing Healing

	HealthCheckNodePort uint16 // zero: none
	Ports               []ServicePort
}

// LoadBalancerIP is one address of status.loadBalancer.ingress.
type LoadBalancerIP struct {
	Addr netip.Addr
	// Proxy is set for any ipMode but VIP: traffic to the address is the load
	// balancer's own (KEP-1860).
	Proxy bool
}

// ServicePort is one port of a Service.
type ServicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
	NodePort uint16 // zero: none
}

// externalPolicy returns the external traffic policy, which only counts for a
// Service that clients outside the cluster may reach, by its type or because it has
// external IPs of any family.
func (s *Service) externalPolicy() TrafficPolicy {
	if s.ExternalPolicy != Local || s.Type == ClusterIP && len(s.ExternalIPs) == 0 {
		return Cluster
	}
	return Local
}

// internalPolicy returns the internal traffic policy. It only counts for
// ClusterIPs.
func (s *Service) internalPolicy() TrafficPolicy {
	if s.InternalPolicy == Local {
		return Local
	}
	return Cluster
}

// wantsLocal reports whether one of the policies is Local.
func (s *Service) wantsLocal() bool {
	return s.internalPolicy() == Local || s.externalPolicy() == Local
}

// The texts of the enums.
var (
	protocolText      = map[Protocol]string{AnyProtocol: "any", TCP: "TCP", UDP: "UDP", SCTP: "SCTP"}
	scopeText         = map[Scope]string{Internal: "internal", External: "external"}
	kindText          = map[Kind]string{KindClusterIP: "ClusterIP", KindExternalIP: "ExternalIP", KindLoadBalancer: "LoadBalancer", KindNodePort: "NodePort"}
	serviceTypeText   = map[ServiceType]string{ClusterIP: "ClusterIP", NodePort: "NodePort", LoadBalancer: "LoadBalancer", ExternalName: "ExternalName"}
	trafficPolicyText = map[TrafficPolicy]string{Cluster: "Cluster", Local: "Local"}
	familyText        = map[Family]string{IPv4: "IPv4", IPv6: "IPv6"}
	useText           = map[Use]string{
		Used:       "used",
		NotReady:   "not ready",
		NotServing: "terminating and not serving",
		Superseded: "terminating, others are ready",
		OtherZone:  "other zone (topology hints)",
		OtherNode:  "other node (topology hints)",
		NotLocal:   "other node (traffic policy Local)",
		NoFrontend: "no frontend leads to it",
	}
)

func (p Protocol) String() string      { return format(protocolText, p) }
func (s Scope) String() string         { return format(scopeText, s) }
func (k Kind) String() string          { return format(kindText, k) }
func (u Use) String() string           { return format(useText, u) }
func (t ServiceType) String() string   { return format(serviceTypeText, t) }
func (p TrafficPolicy) String() string { return format(trafficPolicyText, p) }
func (f Family) String() string        { return format(familyText, f) }

// MarshalText implements [encoding.TextMarshaler].
func (p Protocol) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (s Scope) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// MarshalText implements [encoding.TextMarshaler].
func (u Use) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (p *Protocol) UnmarshalText(text []byte) error { return parse(protocolText, p, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (s *Scope) UnmarshalText(text []byte) error { return parse(scopeText, s, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (k *Kind) UnmarshalText(text []byte) error { return parse(kindText, k, text) }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (u *Use) UnmarshalText(text []byte) error { return parse(useText, u, text) }

// format returns the text of v, or its number if it has none.
func format[E ~uint8](table map[E]string, v E) string {
	if text, ok := table[v]; ok {
		return text
	}
	return fmt.Sprintf("%d", uint8(v))
}

// parse is the inverse of format, for values that have a text.
func parse[E ~uint8](table map[E]string, v *E, text []byte) error {
	for value, name := range table {
		if name == string(text) {
			*v = value
			return nil
		}
	}
	return fmt.Errorf("no %T is called %q", *v, text)
}
