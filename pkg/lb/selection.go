package lb

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

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
	r.served = slices.Grow(r.memory.served[:0], count)
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
	r.memory.served = r.served
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

// join adds the endpoints of one family behind a service port to the result, sorted by
// address and port, and returns them. A slice's port belongs to it if name and protocol are
// equal. Which of them new flows use is not decided yet.
//
// An endpoint may be in several slices, while it moves from one to another or
// when a new pod got the address of an old one. The last one that is not
// terminating counts, else the first. As in kube-proxy, the choice does not depend on
// whether an endpoint is ready or on this node.
func (r *resolver) join(port *PortName, family Family) []EndpointState {
	first := len(r.out.Endpoints)
	serving, _ := r.serving(*port, family)
	for _, p := range serving {
		for i := range p.slice.Endpoints {
			e := &p.slice.Endpoints[i]
			if FamilyOf(e.Addr) != family {
				continue
			}
			node := placeOf(e.Place).NodeName
			r.out.Endpoints = append(r.out.Endpoints, EndpointState{
				Port: port, Addr: netip.AddrPortFrom(e.Addr, p.number),
				place: e.Place, Local: node != "" && node == r.node.Name,
				Ready: e.Ready, Terminating: e.Terminating, Alive: e.Ready || e.Serving,
			})
		}
	}
	all := r.out.Endpoints[first:]
	slices.SortStableFunc(all, func(a, b EndpointState) int { return a.Addr.Compare(b.Addr) })
	kept := all[:0]
	for _, e := range all {
		last := len(kept) - 1
		switch {
		case last < 0 || kept[last].Addr != e.Addr:
			kept = append(kept, e)
		case !e.Terminating:
			kept[last] = e
		}
	}
	r.out.Endpoints = r.out.Endpoints[:first+len(kept)]
	return kept
}

// hints is which topology hints of the endpoints of one service port count
// (KEP-2433, KEP-3015).
type hints uint8

const (
	noHints hints = iota
	forZones
	forNodes
)

// hintsOf returns which hints of the ready endpoints count. Those of a kind count if all
// ready endpoints have one and at least one of them names this node or its zone; hints
// for nodes come first. So at least one endpoint is always allowed.
func hintsOf(endpoints []EndpointState, node *Node) hints {
	nodes, zones := node.Name != "", node.Zone != ""
	anyNode, anyZone := false, false
	for i := range endpoints {
		e := &endpoints[i]
		if !e.Ready {
			continue
		}
		place := e.Place()
		nodes = nodes && place.ForNodes != ""
		zones = zones && place.ForZones != ""
		if !nodes && !zones {
			return noHints
		}
		anyNode = anyNode || place.ForNodes.has(node.Name)
		anyZone = anyZone || place.ForZones.has(node.Zone)
	}
	switch {
	case nodes && anyNode:
		return forNodes
	case zones && anyZone:
		return forZones
	}
	return noHints
}

// allow reports whether the hints of e, a ready endpoint, allow this node to use it.
func (h hints) allow(e *EndpointState, node *Node) bool {
	switch h {
	case forNodes:
		return e.Place().ForNodes.has(node.Name)
	case forZones:
		return e.Place().ForZones.has(node.Zone)
	}
	return true
}

// selection is the endpoints of one service port in one family, and the backends
// among them that serve new flows under each traffic policy.
type selection struct {
	states []EndpointState
	hints  hints
	lists  [2]backendList // by TrafficPolicy
	memory *Memory
}

// backendList is the backends that one traffic policy allows.
type backendList struct {
	backends []Backend
	inUse    bool // at least one frontend has them
}

// selectEndpoints fills each list with the ready endpoints or, if there is none, with
// those that are terminating and still serve (KEP-1669). Hints only count among ready
// endpoints under the policy Cluster (KEP-2433). The list for Local is only filled if
// wantLocal is set.
func selectEndpoints(states []EndpointState, node *Node, wantLocal bool, in *Memory) selection {
	s := selection{states: states, hints: hintsOf(states, node), memory: in}
	s.fill(Cluster, node)
	if !wantLocal {
		return s
	}
	s.fill(Local, node)
	if slices.Equal(s.lists[Local].backends, s.lists[Cluster].backends) {
		s.lists[Local].backends = s.lists[Cluster].backends // share memory
	}
	return s
}

// decide returns whether new flows may use e under a policy, and if not, why. Superseded
// depends on the others, so fill decides whether that stays.
func (s *selection) decide(e *EndpointState, policy TrafficPolicy, node *Node) Use {
	switch {
	case !e.Ready && !e.Terminating:
		return NotReady
	case !e.Alive:
		return NotServing
	case policy == Local && !e.Local:
		return NotLocal
	case !e.Ready:
		return Superseded
	case policy == Local || s.hints.allow(e, node):
		return Used
	case s.hints == forNodes:
		return OtherNode
	}
	return OtherZone
}

// fill decides on each endpoint, and makes those that are used the list of a policy, which
// is nil if there is none.
func (s *selection) fill(policy TrafficPolicy, node *Node) {
	var counts [NoFrontend]int // by Use
	for i := range s.states {
		e := &s.states[i]
		e.Uses[policy] = s.decide(e, policy, node)
		counts[e.Uses[policy]]++
	}
	chosen := Used
	if counts[Used] == 0 {
		chosen = Superseded
	}
	if counts[chosen] == 0 {
		return
	}
	backends := take(&s.memory.backends, counts[chosen])
	for i := range s.states {
		if e := &s.states[i]; e.Uses[policy] == chosen {
			e.Uses[policy] = Used
			backends = append(backends, Backend{Addr: e.Addr, Local: e.Local, Terminating: e.Terminating})
		}
	}
	s.lists[policy].backends = backends
}

// takeBackends returns the backends that policy allows to a frontend, and marks them as in use.
func (s *selection) takeBackends(policy TrafficPolicy) []Backend {
	s.lists[policy].inUse = true
	return s.lists[policy].backends
}

// any reports whether an endpoint on any node could serve new flows. The list for
// Cluster is only empty if there is none: hints always leave some.
func (s *selection) any() bool { return s.lists[Cluster].backends != nil }

// anyLocal reports whether an endpoint on this node serves new flows.
func (s *selection) anyLocal() bool { return s.lists[Local].backends != nil }

// use returns whether new flows use e at any frontend, and if not, why.
func (s *selection) use(e *EndpointState) Use {
	cluster, local := s.lists[Cluster].inUse, s.lists[Local].inUse
	switch {
	case !cluster && !local:
		return NoFrontend
	case local && (!cluster || e.Uses[Local] == Used):
		return e.Uses[Local]
	}
	return e.Uses[Cluster]
}
