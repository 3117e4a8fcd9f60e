package lb

import (
	"net/netip"
	"slices"
)

// candidate is an endpoint at one port.
type candidate struct {
	*Endpoint
	addr  netip.AddrPort
	local bool    // on this node
	in    [2]bool // by TrafficPolicy: chosen for new flows
}

// draining says that e is on its way out and may still serve new flows.
func (e *candidate) draining() bool { return e.Serving && e.Terminating }

// join returns the endpoints of one family behind a service port, sorted by
// address and port. A slice's port belongs to it if name and protocol are equal.
//
// An endpoint may be in several slices, while it moves from one to another or
// when a new pod got the address of an old one. The last one that is not
// terminating counts, else the first. As to kube-proxy, it does not matter whether
// one is ready or on this node.
func (r *resolver) join(port PortName, family Family) []candidate {
	all := make([]candidate, 0, r.endpointCount(port, family))
	for _, slice := range r.slices {
		for _, p := range slice.Ports {
			if !slice.serves(p, port, family) {
				continue
			}
			for i := range slice.Endpoints {
				e := &slice.Endpoints[i]
				if FamilyOf(e.Addr) != family {
					continue
				}
				local := e.NodeName != "" && e.NodeName == r.node.Name
				all = append(all, candidate{Endpoint: e, addr: netip.AddrPortFrom(e.Addr, p.Port), local: local})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return a.addr.Compare(b.addr) })
	return unique(all)
}

// endpointCount returns how many endpoints join can find, duplicates included.
func (r *resolver) endpointCount(port PortName, family Family) int {
	count := 0
	for _, slice := range r.slices {
		for _, p := range slice.Ports {
			if slice.serves(p, port, family) {
				count += len(slice.Endpoints)
			}
		}
	}
	return count
}

// serves says whether p, one of the slice's ports, is the port of a Service.
func (s *EndpointSlice) serves(p EndpointPort, port PortName, family Family) bool {
	return p.Name == port.Port && p.Protocol == port.Protocol && p.Port != 0 &&
		s.Family == family && s.Service == port.Service
}

// unique drops all but one of the candidates that have the same address. They
// are sorted by it, and among themselves in the order of their slices.
func unique(sorted []candidate) []candidate {
	kept := sorted[:0]
	for _, e := range sorted {
		last := len(kept) - 1
		switch {
		case last < 0 || kept[last].addr != e.addr:
			kept = append(kept, e)
		case !e.Terminating:
			kept[last] = e
		}
	}
	return kept
}
