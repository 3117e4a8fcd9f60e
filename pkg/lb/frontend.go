package lb

import (
	"fmt"
	"net/netip"
	"time"
)

// Scope is where a lookup starts. Every frontend is written under each scope
// from which it can be reached, with the backends its traffic policy allows
// there.
type Scope uint8

// The scopes.
const (
	Internal Scope = 1 // sockets of this node, devices that face pods
	External Scope = 2 // uplinks
)

// Kind is what makes an address a frontend.
type Kind uint8

// The kinds of frontends.
const (
	KindClusterIP    Kind = 1
	KindExternalIP   Kind = 2
	KindLoadBalancer Kind = 3
	KindNodePort     Kind = 4
)

// FrontendKey is what a client dials.
//
// A node port has the unspecified address of its family: it answers on every
// address of the node that nodePortAddresses selects. Port zero with
// [AnyProtocol] is the catch-all of a ClusterIP: it refuses what no other
// frontend of that address takes.
type FrontendKey struct {
	Addr     netip.Addr
	Port     uint16
	Protocol Protocol
	Scope    Scope
}

// String returns "10.96.0.1:80/TCP internal", and for a catch-all
// "10.96.0.1:*/any internal".
func (k FrontendKey) String() string {
	if k.Port != 0 {
		return fmt.Sprintf("%s/%s %s", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol, k.Scope)
	}
	format := "%s:*/%s %s"
	if k.Addr.Is6() {
		format = "[%s]:*/%s %s"
	}
	return fmt.Sprintf(format, k.Addr, k.Protocol, k.Scope)
}

// Frontend is one (address, port, protocol, scope) that a client can dial,
// with the backends that may answer there.
type Frontend struct {
	Key  FrontendKey
	Kind Kind
	Port PortName // the service port it belongs to; a catch-all names the Service, no port and AnyProtocol

	// Backends are sorted by address and port and hold no duplicates. (The
	// order shows only where a client with affinity remembers several of them;
	// kube-proxy sorts by text, which puts 10.0.0.10 before 10.0.0.9.)
	// Frontends of one service port that have equal backends share one slice.
	//
	// When there are none, DropIfEmpty says whether clients are dropped
	// (another node could serve them) or rejected (nobody can). It is false on
	// a frontend that has backends.
	Backends    []Backend
	DropIfEmpty bool

	Affinity time.Duration // zero: none; a catch-all has none

	// Algorithm chooses among Backends. It is never [DefaultAlgorithm], but on a
	// catch-all, which has no backends.
	Algorithm Algorithm

	// Masquerade: whoever connects, a backend sees this node. It is set where
	// kube-proxy's masqueradeAll, if it is on, hides the client: at ClusterIPs,
	// and at what the world outside can dial if the external traffic policy is
	// Cluster. (Without, it is left to who sees the packet.)
	Masquerade bool

	// SourceRanges restricts who may connect, from inside the cluster too;
	// empty is everybody. Only load balancers' addresses have them: kind
	// LoadBalancer, or a ClusterIP that is a load balancer's address as well.
	// Sorted, of the frontend's family, shared by the Service's frontends.
	//
	// NodeInRanges says that the node's own IP is in one of the Service's
	// ranges. Then the load balancers' addresses themselves are among
	// SourceRanges: where they are bound to the node, it uses them as source.
	SourceRanges []netip.Prefix
	NodeInRanges bool
}

// Backend is one (address, port) that answers.
type Backend struct {
	Addr        netip.AddrPort
	Local       bool // on this node
	Terminating bool
}
