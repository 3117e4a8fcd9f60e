package lb

import (
	"cmp"
	"net/netip"
	"strings"
	"unique"
)

// SliceName identifies an EndpointSlice.
type SliceName struct {
	Namespace string
	Name      string
}

func (n SliceName) String() string { return n.Namespace + "/" + n.Name }

func (n SliceName) compare(m SliceName) int {
	return cmp.Or(strings.Compare(n.Namespace, m.Namespace), strings.Compare(n.Name, m.Name))
}

// EndpointSlice is a parsed EndpointSlice object, without the fields that a Service
// proxy never reads.
type EndpointSlice struct {
	Name      SliceName
	Service   ServiceName
	Family    Family
	Ports     []EndpointPort
	Endpoints []Endpoint
}

// EndpointPort is a port that all endpoints of a slice have.
type EndpointPort struct {
	Name     string
	Protocol Protocol
	Port     uint16 // never zero
}

// Endpoint is one endpoint of a slice. Conditions that the object leaves out have
// their defaults: ready, serving, not terminating.
type Endpoint struct {
	Addr        netip.Addr
	Place       unique.Handle[Place] // the zero Handle is an empty Place
	Ready       bool
	Serving     bool
	Terminating bool
}

// Place is the location of an endpoint and its topology hints. It is interned, because many
// endpoints of a cluster have equal ones, and every decoded object brings its own copy.
type Place struct {
	NodeName string // empty: the node is not known, so the endpoint is never local
	Zone     string // for display; no policy reads it
	ForZones Names  // hints.forZones
	ForNodes Names  // hints.forNodes
}

// placeOf returns what a handle stands for, an empty Place for the zero Handle.
func placeOf(h unique.Handle[Place]) Place {
	if h == (unique.Handle[Place]{}) {
		return Place{}
	}
	return h.Value()
}

// Names are the names of zones or nodes, each with a newline behind it. They are one string
// because a Place must be comparable.
type Names string

// NamesOf returns the Names that consist of names.
func NamesOf(names ...string) Names {
	var all strings.Builder
	for _, name := range names {
		all.WriteString(name + "\n")
	}
	return Names(all.String())
}

// has reports whether name is one of n.
func (n Names) has(name string) bool {
	for one := range strings.Lines(string(n)) {
		if one[:len(one)-1] == name {
			return true
		}
	}
	return false
}

// Node is what the policy depends on of the node that the agent runs on.
type Node struct {
	Name string // as in Endpoint.NodeName
	Zone string // label topology.kubernetes.io/zone; empty: none

	// PrimaryIPs holds at most one address per family: the node IP. The node's own
	// traffic is compared with loadBalancerSourceRanges by it, and nodePortAddresses
	// "primary" selects it.
	PrimaryIPs []netip.Addr

	// MasqueradeAll is an option of the agent, and not of the Node object:
	// see [Frontend.Masquerade].
	MasqueradeAll bool

	// Algorithm is that of Services which do not name one; [DefaultAlgorithm] means
	// [Random]. It is an option of the agent, too.
	Algorithm Algorithm

	// IgnoreExternalIPs is set if kube-proxy's feature gate AllowServiceExternalIPs is
	// off: spec.externalIPs make no frontends. It is an option of the agent.
	IgnoreExternalIPs bool

	// Dialed is where the agent has dialed the API server, in any order, and APIServers are the
	// endpoints of [KubernetesService], sorted, which a [State] sets. No Service takes these.
	Dialed, APIServers []netip.AddrPort

	// Limits follow from the capacity of the maps. They are an option of the agent.
	Limits Limits
}
