// Package lb is the model and the policy of Sluice: it makes frontends with their
// backends of Services and endpoints. It is pure: no clock, no I/O, no Kubernetes types.
package lb

import (
	"cmp"
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

	// Affinity is how long a client keeps its backend after its last new flow, at all
	// addresses of the service port together; zero is no session affinity.
	Affinity time.Duration

	// Algorithm is the one by which its frontends choose a backend.
	Algorithm Algorithm

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
