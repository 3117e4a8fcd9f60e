package lb

import "net/netip"

// Resolution is all that follows from one Service, its EndpointSlices and the
// node: what clients can dial, and what became of every endpoint. It is read
// only: its parts share memory with each other.
type Resolution struct {
	Frontends []Frontend
	Endpoints []EndpointState
	Problems  []Problem
}

// EndpointState is one endpoint of one service port, and what became of it.
type EndpointState struct {
	Port     PortName
	Addr     netip.AddrPort
	NodeName string
	Zone     string
	Local    bool

	// Use says whether new flows may choose it at any frontend, and if not,
	// why.
	Use Use

	Ready bool

	// Alive endpoints keep the flows that they have (ready or serving), also
	// when no new flow may choose them.
	Alive bool
}

// LocalReady returns how many endpoints of a family on this node are ready,
// counted by address over all ports: the answer of the health check node port.
func (r Resolution) LocalReady(family Family) int {
	addrs := make(map[netip.Addr]bool)
	for _, e := range r.Endpoints {
		if e.Local && e.Ready && FamilyOf(e.Addr.Addr()) == family {
			addrs[e.Addr.Addr()] = true
		}
	}
	return len(addrs)
}
