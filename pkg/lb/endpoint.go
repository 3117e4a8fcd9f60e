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

// EndpointSlice is what an EndpointSlice object says, parsed and without what
// a Service proxy never reads.
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

// Endpoint is one endpoint of a slice. Conditions that the object leaves out
// have their meaning filled in: ready, serving, not terminating.
type Endpoint struct {
	Addr        netip.Addr
	Place       unique.Handle[Place] // the zero Handle: an empty one
	Ready       bool
	Serving     bool
	Terminating bool
}

// Place is where an endpoint is, and for whom. Of the endpoints of a cluster, many have equal
// ones, and every object that is decoded brings its own: so each is there once.
type Place struct {
	NodeName string // empty: on no known node, so never local
	Zone     string // for display; no policy reads it
	ForZones Names  // hints.forZones
	ForNodes Names  // hints.forNodes
}

// place returns where e is.
func (e *Endpoint) place() Place {
	if e.Place == (unique.Handle[Place]{}) {
		return Place{}
	}
	return e.Place.Value()
}

// Names are names of zones or nodes, each with a newline behind it: as a list, a Place could
// not be compared.
type Names string

// NamesOf returns names that can be compared.
func NamesOf(names ...string) Names {
	var all strings.Builder
	for _, name := range names {
		all.WriteString(name + "\n")
	}
	return Names(all.String())
}

// has reports whether a name is among the names.
func (n Names) has(name string) bool {
	for one := range strings.Lines(string(n)) {
		if one[:len(one)-1] == name {
			return true
		}
	}
	return false
}

// Node is what the policy needs to know of the node that we run on.
type Node struct {
	Name string // as in Endpoint.NodeName
	Zone string // label topology.kubernetes.io/zone; empty: none

	// PrimaryIPs holds at most one address a family: the node IP that
	// loadBalancerSourceRanges are held against for the node's own traffic,
	// and the meaning of nodePortAddresses "primary".
	PrimaryIPs []netip.Addr

	// MasqueradeAll is an option of the agent, and not of the Node object:
	// see [Frontend.Masquerade].
	MasqueradeAll bool

	// Algorithm is that of Services which do not name one; [DefaultAlgorithm] is
	// [Random]. An option of the agent, too.
	Algorithm Algorithm

	// IgnoreExternalIPs is kube-proxy's feature gate AllowServiceExternalIPs,
	// switched off: nobody can dial spec.externalIPs. An option of the agent.
	IgnoreExternalIPs bool

	// Limits are those of the maps. An option of the agent.
	Limits Limits
}
