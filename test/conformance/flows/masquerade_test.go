package flows

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// masquerades reports whether a target sees this node instead of the client
// (DESIGN.md 2.2): if its reply would otherwise miss this node, if it is the
// client itself, or with masqueradeAll, which means what it means to
// kube-proxy. What this node itself answers is not sent: no other node has to return the
// reply back.
func (s *scenario) masquerades(f flow, p path, target netip.AddrPort) bool {
	switch {
	case p.socket, target == f.dest(), s.Node.has(target.Addr()):
		return false
	case target.Addr() == f.SourceIP:
		return true
	case p.from == beyond && !s.isLocalTarget(f, target):
		return true
	}

	return s.Node.MasqueradeAll && f.Masq
}

// Why Sluice masquerades a flow and kube-proxy does not, or the other way round.
const (
	sameMasquerade    = ""
	preservedBackend  = "listed difference 1: the backend is on this node"
	preservedClient   = "listed difference 1: the client is on this node"
	deliveredLocally  = "the node itself answers: kube-proxy's masquerade changes nothing (CONTRACT.md 1.5.6)"
	otherNodesPod     = "a pod of another node: the reply would miss this node (DESIGN.md 2.2)"
	withoutDetector   = "no detector: the reply would miss this node (DESIGN.md 2.2)"
	otherTarget       = "a hairpin flow's masq is about another target"
	socketsKeepClient = "a socket's client keeps its address, with masqueradeAll too"
	remoteHairpin     = "a backend of another node dials itself: the reply would miss this node (DESIGN.md 2.2)"
	unknownMasquerade = "unexplained"
)

// masqueradeDiffers returns why a target sees another client than kube-proxy's
// would.
func (s *scenario) masqueradeDiffers(f flow, p path, target netip.AddrPort) string {
	hairpin := target.Addr() == f.SourceIP
	switch masquerades := s.masquerades(f, p, target); {
	case masquerades == f.Masq:
		return sameMasquerade
	case masquerades && hairpin && !s.isLocalTarget(f, target):
		return remoteHairpin
	case masquerades && !s.Node.LocalCIDR.IsValid():
		return withoutDetector
	case masquerades && s.mayBePod(f.SourceIP):
		return otherNodesPod
	case masquerades:
		return unknownMasquerade
	case s.Node.has(target.Addr()):
		return deliveredLocally
	case s.isHairpin(f) && !hairpin:
		return otherTarget
	case p.socket && s.Node.MasqueradeAll:
		return socketsKeepClient
	case p.from != beyond:
		return preservedClient
	}

	return preservedBackend
}

// isHairpin reports whether a flow may be sent to its own sender, on this node.
func (s *scenario) isHairpin(f flow) bool {
	return slices.ContainsFunc(f.Output, func(text string) bool {
		target, err := netip.ParseAddrPort(text)

		return err == nil && target.Addr() == f.SourceIP && s.isLocalTarget(f, target)
	})
}

// kubeProxyMasquerades is what kube-proxy does (CONTRACT.md part 0, C, D and F).
// It is not sure where Services claim the same address.
func (s *scenario) kubeProxyMasquerades(f flow) (masquerades, sure bool) {
	if len(f.Output) == 0 || slices.ContainsFunc(f.Output, isRefusal) {
		return false, true
	}
	claims := s.claims(f)
	if len(claims) != 1 {
		return false, false
	}
	detected := s.Node.LocalCIDR.IsValid()
	isPod := detected && s.Node.LocalCIDR.Contains(f.SourceIP)
	c := claims[0]
	switch {
	case s.isHairpin(f):
		return true, true
	case c.internal:
		return s.Node.MasqueradeAll || detected && !isPod, true
	case c.service.isExternalLocal():
		return !isPod && s.Node.has(f.SourceIP), true
	}

	return true, true
}

// checkMasquerade returns what is wrong with what a fixture says about a flow's
// masquerade: the drivers check by a rule of their own. If nothing is, it returns
// where that differs from the fixture.
func (s *scenario) checkMasquerade(f flow, p path, want expected) (note, wrong string) {
	if masq, sure := s.kubeProxyMasquerades(f); sure && f.Masq != masq {
		return "", fmt.Sprintf("masq is %t, CONTRACT.md part 0 says %t", f.Masq, masq)
	}
	var notes []string
	for _, outcome := range want.outcomes {
		target, err := netip.ParseAddrPort(outcome)
		if err != nil || target == f.dest() {
			continue
		}
		switch reason := s.masqueradeDiffers(f, p, target); reason {
		case sameMasquerade:
		case unknownMasquerade:
			return "", fmt.Sprintf("%s: masq is %t: %s", target, f.Masq, reason)
		default:
			notes = append(notes, reason)
		}
	}
	slices.Sort(notes)

	return strings.Join(slices.Compact(notes), "; "), ""
}

func isRefusal(outcome string) bool { return outcome == reject || outcome == drop }
