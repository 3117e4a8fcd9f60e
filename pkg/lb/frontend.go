package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Scope is the side from which a client connects. Every frontend exists once per scope
// from which clients reach it, with the backends that its traffic policy allows there.
type Scope uint8

// The scopes.
const (
	Internal Scope = 1 // sockets of this node, devices that face pods
	External Scope = 2 // uplinks
)

// Kind is the field of a Service that a frontend's address comes from.
type Kind uint8

// The kinds of frontends.
const (
	KindClusterIP    Kind = 1
	KindExternalIP   Kind = 2
	KindLoadBalancer Kind = 3
	KindNodePort     Kind = 4
)

// FrontendKey is what a client connects to.
//
// A node port has the unspecified address of its family: it answers on every
// address of the node that nodePortAddresses selects. Port zero with
// [AnyProtocol] is the catch-all of a ClusterIP: it refuses connections to ports that
// no other frontend of that address has.
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
	// order matters only where a client with affinity has had several of them;
	// kube-proxy sorts by text, which puts 10.0.0.10 before 10.0.0.9.)
	// Frontends of one service port that have equal backends share one slice.
	//
	// Without backends, packets of clients are dropped if DropIfEmpty is set, because
	// another node has endpoints, go where routes lead them if PassIfEmpty is set, and are
	// rejected otherwise. A frontend with backends has neither set.
	Backends    []Backend
	DropIfEmpty bool
	PassIfEmpty bool
	Policy      TrafficPolicy // by which Backends were selected

	Affinity time.Duration // zero: none; a catch-all has none

	// Algorithm chooses among Backends. It is never [DefaultAlgorithm], but on a
	// catch-all, which has no backends.
	Algorithm Algorithm

	// Masquerade is set if backends see this node as the source of every client. That is
	// so with kube-proxy's masqueradeAll at ClusterIPs, and at external addresses if
	// the external traffic policy is Cluster. If it is not set, the datapath decides
	// packet by packet.
	Masquerade bool

	// OptedOut is set if sockets of pods are left alone, and devices translate instead.
	OptedOut bool

	// Healing is how much of the node's healing its connections get.
	Healing Healing

	// SourceRanges are the sources from which clients may connect, inside the cluster
	// too; if empty, all. Only load balancers' addresses have them: kind
	// LoadBalancer, or a ClusterIP that is a load balancer's address as well. They are
	// sorted, of the frontend's family, and shared by the Service's frontends.
	//
	// NodeInRanges is set if the node's own IP is in one of the Service's
	// ranges. Then the load balancers' addresses themselves are among
	// SourceRanges: the node uses them as source where they are bound to it.
	SourceRanges []netip.Prefix
	NodeInRanges bool
}

// Backend is one (address, port) that answers.
type Backend struct {
	Addr        netip.AddrPort
	Local       bool // on this node
	Terminating bool
}

// Algorithm is the way in which a frontend chooses a backend for a new flow.
type Algorithm uint8

// The algorithms. Their names are those of the schedulers of IPVS, where it has one.
const (
	DefaultAlgorithm Algorithm = iota // of a Service: the one of the agent's configuration
	Random
	RoundRobin
	LeastConnections      // of two at random, the one with fewer live connections
	ShortestExpectedDelay // of all, the one with the fewest; Kubernetes knows no weights
	NeverQueue            // the first that has none, else as ShortestExpectedDelay
	SourceHash            // by the address of the client
	DestinationHash       // by the VIP
	Maglev                // by the whole flow, the same on every node
)

var algorithmText = [...]string{"default", "random", "rr", "lc", "sed", "nq", "sh", "dh", "maglev"}

// ParseAlgorithm parses the name of an algorithm, as String returns it. The
// default cannot be named.
func ParseAlgorithm(text string) (Algorithm, error) {
	known := algorithmText[Random:]
	if i := slices.Index(known, text); i >= 0 {
		return Random + Algorithm(i), nil
	}

	return DefaultAlgorithm, fmt.Errorf("%q is none of the algorithms %s", text, strings.Join(known, ", "))
}

func (a Algorithm) String() string {
	if int(a) < len(algorithmText) {
		return algorithmText[a]
	}

	return fmt.Sprintf("algorithm %d", uint8(a))
}

// Hashes reports whether a looks a hash up in a table of backends.
func (a Algorithm) Hashes() bool { return a == SourceHash || a == DestinationHash || a == Maglev }
