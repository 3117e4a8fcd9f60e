package flows

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// expected is the outcomes that a flow may have: "address:port" of the server that
// answers, or what is refused with.
type expected struct {
	outcomes []string

	// sticky: one of the outcomes, and then always that one, for the client is
	// remembered (CONTRACT.md 1.9).
	sticky bool

	// kernels: it is the kernel that refuses or drops, and not Sluice.
	kernels bool

	note string // why this differs from the fixture
}

// expect returns the outcome that a flow must have on a path: that of the fixture, but for
// what Sluice does otherwise. (Of the differences that DESIGN.md 6 lists, 1 and 4
// change no first packet's way, and 2 is how [drop] looks to a socket.)
func (s *scenario) expect(f flow, p path) expected {
	want := expected{outcomes: f.Output, sticky: s.isSticky()}
	switch {
	case p.from == onNode && !p.socket:
		want.outcomes, want.note = nil, "no hook sees what the node itself sends by "+string(f.Protocol)
	case p.from == onNode && f.DestIP.IsLoopback():
		s.expectOnLoopback(f, &want)
	case p.from == inPod && !s.Node.LocalCIDR.IsValid():
		s.expectOfPod(f, &want)
	case p.from == beyond && s.Node.LocalCIDR.Contains(f.SourceIP) && !f.DestIP.IsLoopback():
		s.expectOfPodElsewhere(f, &want)
	case p.from == beyond && f.DestIP.IsLoopback():
		want.outcomes, want.kernels = []string{drop}, true
		want.note = "the kernel drops what comes to a loopback address by a device"
	}
	if len(want.outcomes) == 0 {
		want.outcomes = []string{f.dest().String()}
		want.note = strings.TrimPrefix(want.note+"; untouched: the owner of that address answers", "; ")
	}

	return want
}

// expectOnLoopback accounts for node ports that answer on loopback: without a list of addresses, or if it
// has loopback's or none of the family.
func (s *scenario) expectOnLoopback(f flow, want *expected) {
	of, listed, selected := familyOf(f.DestIP), false, false
	for _, text := range s.Node.NodePortAddresses {
		p := netip.MustParsePrefix(text)
		listed = listed || p.Addr().Is4() == f.DestIP.Is4()
		selected = selected || p.Contains(f.DestIP)
	}
	if listed && !selected {
		return
	}
	svc, port, found := s.nodePort(of, f.Protocol, f.DestPort)
	if !found {
		return
	}
	want.outcomes = s.clusterBackends(svc, port, of)
	want.note = "listed difference 3: the node port answers on loopback"
	if len(want.outcomes) == 0 {
		want.outcomes = []string{reject}
	}
}

// expectOfPod accounts for a difference: without a detector, a pod of this node is recognized by its
// device or its socket. To kube-proxy it is an outsider (CONTRACT.md 1.5.2).
func (s *scenario) expectOfPod(f flow, want *expected) {
	claims := s.claims(f)
	if len(claims) != 1 || claims[0].internal || !claims[0].service.isExternalLocal() {
		return
	}
	c := claims[0]
	backends := s.clusterBackends(c.service, c.port, familyOf(f.DestIP))
	if len(backends) == 0 || c.balancer && !c.service.admits(f.SourceIP) {
		return
	}
	want.outcomes = backends
	want.note = "no detector: Sluice recognizes pods of this node by their devices and sockets (DESIGN.md 2.2)"
}

// expectOfPodElsewhere accounts for a pod of another node being external. To kube-proxy
// it is one of this node's, by its address, but what reaches a backend on its own
// node is not answered by this one.
func (s *scenario) expectOfPodElsewhere(f flow, want *expected) {
	claims := s.claims(f)
	if len(claims) != 1 || claims[0].internal || !claims[0].service.isExternalLocal() || slices.ContainsFunc(f.Output, isRefusal) {
		return
	}
	want.outcomes = s.localBackends(claims[0].service, claims[0].port, familyOf(f.DestIP))
	if len(want.outcomes) == 0 {
		want.outcomes = []string{drop}
	}
	if !slices.Equal(want.outcomes, f.Output) {
		want.note = "a pod of another node is external (DESIGN.md 2.2)"
	}
}

// isSticky reports whether Services have session affinity. A scenario in which only
// some do is checked as if all did.
func (s *scenario) isSticky() bool {
	return slices.ContainsFunc(s.Services, func(svc service) bool {
		return svc.SessionAffinity == corev1.ServiceAffinityClientIP
	})
}

// attempts is how often to connect so that each of n equally likely targets, and
// a further one that should not be, is seen but for one case in 10⁹.
func attempts(n int) int {
	all := float64(n + 1)

	return int(math.Ceil(math.Log(1e-9/all) / math.Log(1-1/all)))
}

// stray returns an outcome that is not allowed, or "".
func (e expected) stray(seen map[string]int) string {
	for _, outcome := range slices.Sorted(maps.Keys(seen)) {
		if !slices.Contains(e.outcomes, outcome) {
			return fmt.Sprintf("%s, want %s", outcome, strings.Join(e.outcomes, " "))
		}
	}

	return ""
}

// check compares the outcomes of connections with the expected ones. It returns
// "" if all is well.
func (e expected) check(seen map[string]int) string {
	if wrong := e.stray(seen); wrong != "" {
		return wrong
	}
	if e.sticky {
		if len(seen) != 1 {
			return fmt.Sprintf("a client with affinity reached %v", slices.Sorted(maps.Keys(seen)))
		}

		return ""
	}
	for _, outcome := range e.outcomes {
		if seen[outcome] == 0 {
			return fmt.Sprintf("never %s, want %s", outcome, strings.Join(e.outcomes, " "))
		}
	}

	return ""
}
