package lb

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// candidate is an endpoint at one port.
type candidate struct {
	*Endpoint
	addr  netip.AddrPort
	local bool    // on this node
	in    [2]bool // by TrafficPolicy: chosen for new flows
}

// draining reports whether e is terminating and may still serve new flows.
func (e *candidate) draining() bool { return e.Serving && e.Terminating }

// servedPort is one port of one slice of the Service, with the fields that it joins on.
type servedPort struct {
	name     string
	protocol Protocol
	family   Family
	number   uint16
	slice    *EndpointSlice
}

func (p servedPort) compare(q servedPort) int {
	return cmp.Or(cmp.Compare(p.family, q.family), cmp.Compare(p.protocol, q.protocol), strings.Compare(p.name, q.name))
}

// indexSlices sorts the ports of the Service's slices by the fields that they join on.
// Ports that are equal in them keep the order of their slices.
func (r *resolver) indexSlices() {
	count := 0
	for _, slice := range r.slices {
		count += len(slice.Ports)
	}
	r.served = make([]servedPort, 0, count)
	for _, slice := range r.slices {
		if slice.Service != r.svc.Name {
			continue
		}
		for _, p := range slice.Ports {
			if p.Port != 0 {
				r.served = append(r.served, servedPort{p.Name, p.Protocol, slice.Family, p.Port, slice})
			}
		}
	}
	slices.SortStableFunc(r.served, servedPort.compare)
}

// serving returns the slices' ports behind a service port in one family, and how
// many endpoints they have, duplicates included.
func (r *resolver) serving(port PortName, family Family) (found []servedPort, endpoints int) {
	want := servedPort{name: port.Port, protocol: port.Protocol, family: family}
	first, _ := slices.BinarySearchFunc(r.served, want, servedPort.compare)
	last := first
	for last < len(r.served) && r.served[last].compare(want) == 0 {
		endpoints += len(r.served[last].slice.Endpoints)
		last++
	}
	return r.served[first:last], endpoints
}

// join returns the endpoints of one family behind a service port, sorted by
// address and port. A slice's port belongs to it if name and protocol are equal.
//
// An endpoint may be in several slices, while it moves from one to another or
// when a new pod got the address of an old one. The last one that is not
// terminating counts, else the first. As in kube-proxy, the choice does not depend on
// whether an endpoint is ready or on this node.
func (r *resolver) join(port PortName, family Family) []candidate {
	serving, endpoints := r.serving(port, family)
	all := make([]candidate, 0, endpoints)
	for _, p := range serving {
		for i := range p.slice.Endpoints {
			e := &p.slice.Endpoints[i]
			if FamilyOf(e.Addr) != family {
				continue
			}
			node := e.place().NodeName
			local := node != "" && node == r.node.Name
			all = append(all, candidate{Endpoint: e, addr: netip.AddrPortFrom(e.Addr, p.number), local: local})
		}
	}
	slices.SortStableFunc(all, func(a, b candidate) int { return a.addr.Compare(b.addr) })
	return withoutDuplicates(all)
}

// withoutDuplicates drops all but one of the candidates that have the same address. The
// candidates must be sorted by address, and those of one address in the order of their slices.
func withoutDuplicates(sorted []candidate) []candidate {
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
