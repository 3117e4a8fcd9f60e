package kubeproxy

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// destination is what a client dials. A node port has the unspecified address of its family.
type destination struct {
	address  netip.AddrPort
	protocol lb.Protocol
}

// ruleset is kube-proxy's rules of one address family, in either mode.
type ruleset struct {
	names   map[destination]string // namespace/name:port
	chains  map[destination]string // to which packets go; none if the Service has no endpoints
	refused map[destination]string // "reject" or "drop": packets that no chain has translated
	ranges  map[destination][]netip.Prefix
	rules   map[string][]rule // of chains

	nodePortAddrs []netip.Prefix // see [Rules]
}

func newRuleset() ruleset {
	return ruleset{
		names:   make(map[destination]string),
		chains:  make(map[destination]string),
		refused: make(map[destination]string),
		ranges:  make(map[destination][]netip.Prefix),
		rules:   make(map[string][]rule),
	}
}

// rule is a rule that leads to backends.
type rule struct {
	local    bool             // for packets of this node and of pods only
	targets  []string         // chains
	backends []netip.AddrPort // to which the rule itself translates
	affinity time.Duration    // for how long clients are remembered, if the rule is for those
}

// frontends returns what clients can dial, in both scopes. A packet takes the first rule of its chain that
// applies to it; clients of the internal scope are those of rules for local packets.
func (s *ruleset) frontends() []status.Frontend {
	var all []status.Frontend
	for to, name := range s.names {
		for _, scope := range []lb.Scope{lb.Internal, lb.External} {
			f := status.Frontend{
				Service: name, Address: to.address, Protocol: to.protocol, Scope: scope, SourceRanges: s.ranges[to],
			}
			var affinity time.Duration
			f.Backends, affinity = s.follow(s.chains[to], scope, 0)
			f.AffinitySeconds = uint32(affinity / time.Second)
			slices.SortFunc(f.Backends, netip.AddrPort.Compare)
			f.Backends = slices.Compact(f.Backends)
			if len(f.Backends) == 0 {
				f.WhenEmpty = cmp.Or(s.refused[to], "pass")
			}
			all = append(all, f)
		}
	}
	slices.SortFunc(all, status.Frontend.Compare)

	return all
}

// maxDepth is more than the depth to which chains of kube-proxy lead to others.
const maxDepth = 8

// follow returns the backends to which a chain leads, and for how long it remembers clients.
func (s *ruleset) follow(chain string, scope lb.Scope, depth int) (backends []netip.AddrPort, affinity time.Duration) {
	if depth > maxDepth {
		return nil, 0
	}
	for _, r := range s.rules[chain] {
		if r.local && scope == lb.External {
			continue
		}
		backends = append(backends, r.backends...)
		affinity = max(affinity, r.affinity)
		for _, target := range r.targets {
			more, remembered := s.follow(target, scope, depth+1)
			backends = append(backends, more...)
			affinity = max(affinity, remembered)
		}
		if r.local {
			break // it applies to all clients of the scope
		}
	}

	return backends, affinity
}
