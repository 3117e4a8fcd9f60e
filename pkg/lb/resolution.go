package lb

import "net/netip"

// Resolution is the outcome of one Service, its EndpointSlices and the node: the
// frontends, and the use of every endpoint. It is read only: its parts share memory with
// each other.
type Resolution struct {
	Frontends []Frontend
	Endpoints []EndpointState
	Problems  []Problem
}

// EndpointState is one endpoint of one service port, and whether new flows use it.
type EndpointState struct {
	Port     PortName
	Addr     netip.AddrPort
	NodeName string
	Zone     string
	Local    bool

	// Use is whether new flows may choose it at any frontend, and if not, why.
	Use Use

	Ready bool

	// Alive is set if the endpoint is ready or serving: it keeps its flows, even if no
	// new flow may choose it.
	Alive bool
}

// LocalReady returns the number of addresses of a family that are ready endpoints of any
// port on this node. The health check node port answers with it.
func (r Resolution) LocalReady(family Family) int {
	addrs := make(map[netip.Addr]bool)
	for _, e := range r.Endpoints {
		if e.Local && e.Ready && FamilyOf(e.Addr.Addr()) == family {
			addrs[e.Addr.Addr()] = true
		}
	}
	return len(addrs)
}
