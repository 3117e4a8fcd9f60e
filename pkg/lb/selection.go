package lb

import "slices"

// selection is the endpoints of one service port in one family, and the backends
// among them that serve new flows under each traffic policy.
type selection struct {
	candidates []candidate
	hints      hints
	lists      [2]backendList // by TrafficPolicy
}

// backendList is the backends that one traffic policy allows.
type backendList struct {
	backends []Backend
	inUse    bool // at least one frontend has them
}

// selectEndpoints fills each list with the ready endpoints or, if there is none, with
// those that are draining (KEP-1669). Hints only count among ready endpoints under the
// policy Cluster (KEP-2433). The list for Local is only filled if wantLocal is set.
func selectEndpoints(candidates []candidate, node *Node, wantLocal bool) *selection {
	s := &selection{candidates: candidates, hints: hintsOf(candidates, node)}
	s.fill(Cluster,
		func(e *candidate) bool { return e.Ready && s.hints.allow(e.Endpoint, node) },
		func(e *candidate) bool { return e.draining() })
	if wantLocal {
		s.fill(Local,
			func(e *candidate) bool { return e.local && e.Ready },
			func(e *candidate) bool { return e.local && e.draining() })
		s.share()
	}
	return s
}

// fill puts the candidates for which first is true into policy's list or, if there is
// none, those for which fallback is.
func (s *selection) fill(policy TrafficPolicy, first, fallback func(*candidate) bool) {
	backends := s.choose(policy, first)
	if backends == nil {
		backends = s.choose(policy, fallback)
	}
	s.lists[policy].backends = backends
}

// choose marks the eligible candidates and returns them, nil if there is none.
func (s *selection) choose(policy TrafficPolicy, eligible func(*candidate) bool) []Backend {
	count := 0
	for i := range s.candidates {
		e := &s.candidates[i]
		e.in[policy] = eligible(e)
		if e.in[policy] {
			count++
		}
	}
	if count == 0 {
		return nil
	}
	backends := make([]Backend, 0, count)
	for i := range s.candidates {
		if e := &s.candidates[i]; e.in[policy] {
			backends = append(backends, Backend{Addr: e.addr, Local: e.local, Terminating: e.Terminating})
		}
	}
	return backends
}

// share makes equal lists share memory.
func (s *selection) share() {
	if slices.Equal(s.lists[Local].backends, s.lists[Cluster].backends) {
		s.lists[Local].backends = s.lists[Cluster].backends
	}
}

// takeBackends returns the backends that policy allows to a frontend, and marks them as in use.
func (s *selection) takeBackends(policy TrafficPolicy) []Backend {
	s.lists[policy].inUse = true
	return s.lists[policy].backends
}

// any reports whether an endpoint on any node could serve new flows. The list for
// Cluster is only empty if there is none: hints always leave some.
func (s *selection) any() bool { return s.lists[Cluster].backends != nil }

// use returns whether new flows use e, one of the candidates, and if not, why.
func (s *selection) use(e *candidate) Use {
	cluster, local := s.lists[Cluster].inUse, s.lists[Local].inUse
	switch {
	case !cluster && !local:
		return NoFrontend
	case cluster && e.in[Cluster], local && e.in[Local]:
		return Used
	case !e.Ready && !e.Terminating:
		return NotReady
	case !e.Ready && !e.Serving:
		return NotServing
	case !cluster && !e.local:
		return NotLocal
	case !e.Ready:
		return Superseded
	case s.hints == forNodes:
		return OtherNode
	}
	return OtherZone
}
