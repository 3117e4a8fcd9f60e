package status

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// Trial is what a change would make of the Services of this node. Nothing is changed by it.
type Trial struct {
	Node     string         `json:"node"`
	Zone     string         `json:"zone,omitempty"`
	Services []TriedService `json:"services"` // that would be other than they are, sorted by name
	Problems []lb.Problem   `json:"problems,omitempty"`
}

// TriedService is a Service before and after a change.
type TriedService struct {
	Name      string          `json:"name"`    // namespace/name
	Outcome   string          `json:"outcome"` // "new", "deleted" or "changed"
	Frontends []TriedFrontend `json:"frontends"`
	Endpoints []TriedEndpoint `json:"endpoints"`
	// Connections are those of this node's clients to endpoints that go.
	Connections int `json:"connections"`
	// Without are the service ports that would have no endpoint that new connections may use, on any node.
	Without []string `json:"withoutEndpoint,omitempty"`
	// HealthCheck is how the health check node port changes.
	HealthCheck string       `json:"healthCheckNodePort,omitempty"`
	Problems    []lb.Problem `json:"problems,omitempty"`
}

// TriedFrontend is a frontend that comes, goes or changes.
type TriedFrontend struct {
	Service  string         `json:"service"` // namespace/name:port
	Address  netip.AddrPort `json:"address"`
	Protocol lb.Protocol    `json:"protocol"`
	Kind     lb.Kind        `json:"kind"`
	// Outcome is "comes", "goes", or what changes.
	Outcome string `json:"outcome"`
	// Contested is the Service that has the address now, and keeps it unless Yields is set.
	Contested string `json:"contested,omitempty"`
	Yields    bool   `json:"yields,omitempty"`
}

// TriedEndpoint is an endpoint before and after a change, for clients under one traffic policy.
type TriedEndpoint struct {
	Service  string         `json:"service"` // namespace/name:port
	Protocol lb.Protocol    `json:"protocol"`
	Policy   string         `json:"trafficPolicy"`
	Address  netip.AddrPort `json:"address"`
	Node     string         `json:"node,omitempty"`
	Zone     string         `json:"zone,omitempty"`
	// Now and Then are the probabilities, in [0, 1], that a new connection gets it: of a client without affinity, while all
	// endpoints answer and have as many connections.
	Now  float64 `json:"now"`
	Then float64 `json:"then"`
	// State is why new connections would not use it, and whether it comes or goes.
	State       string `json:"state,omitempty"`
	Connections int    `json:"connections"` // of this node's clients, at this moment
}

// TrialInput is what an agent knows of a change: the Services that it concerns, and which Services have their new frontends.
type TrialInput struct {
	Node     *lb.Node
	Outcomes []lb.Outcome
	Owners   map[lb.FrontendKey]Owner
	Problems []lb.Problem
}

// Owner is a Service that has a frontend, and whether that goes to a Service that claims it with another kind of address.
type Owner struct {
	Service lb.ServiceName
	Yields  bool
}

// trial returns what a change would make of Services. The maps have the connections.
func (t TrialInput) trial(ctx context.Context, m *maps.Tables) (Trial, error) {
	trial := Trial{Node: t.Node.Name, Zone: t.Node.Zone, Services: []TriedService{}, Problems: t.Problems}
	var known *states
	for _, outcome := range t.Outcomes {
		if err := ctx.Err(); err != nil {
			return trial, err
		}
		before, after := resolved(outcome.Before), resolved(outcome.After)
		tried := tryOne(outcome, before, after, t.Owners)
		if tried.isSame() {
			continue
		}
		if known == nil {
			of := "" // all
			if len(t.Outcomes) == 1 {
				of = tried.Name
			}
			var err error
			if known, err = newStates(m, of); err != nil {
				return trial, err
			}
		}
		if err := tried.countConnections(outcome.Before, before, known); err != nil {
			return trial, err
		}
		trial.Services = append(trial.Services, tried)
	}

	return trial, nil
}

// resolved returns the resolution of a Service, which is empty if there is none.
func resolved(s lb.Snapshot) lb.Resolution {
	if s.Service == nil {
		return lb.Resolution{}
	}

	return s.Resolve()
}

// tryOne compares a Service before and after a change, without its connections. Owners are the Services that have its new
// frontends.
func tryOne(o lb.Outcome, before, after lb.Resolution, owners map[lb.FrontendKey]Owner) TriedService {
	tried := TriedService{
		Name: o.Name.String(), Outcome: "changed", Problems: after.Problems, Without: withoutEndpoint(after),
		Frontends: tryFrontends(before, after, owners), Endpoints: tryEndpoints(before, after),
	}
	switch {
	case o.Before.Service == nil:
		tried.Outcome = "new"
	case o.After.Service == nil:
		tried.Outcome = "deleted"
	case o.Before.Service.HealthCheckNodePort != o.After.Service.HealthCheckNodePort:
		tried.HealthCheck = fmt.Sprintf("%d → %d", o.Before.Service.HealthCheckNodePort, o.After.Service.HealthCheckNodePort)
	}

	return tried
}

// countConnections adds how many connections this node's clients have to the endpoints.
func (s *TriedService) countConnections(snapshot lb.Snapshot, before lb.Resolution, known *states) error {
	if snapshot.Service == nil {
		return nil
	}
	view := newViews().service(snapshot, before)
	if err := known.add(&view); err != nil {
		return err
	}
	counts := make(map[endpointKey]int)
	for _, port := range view.Ports {
		for _, b := range port.Backends {
			counts[endpointKey{port: lb.PortName{Port: b.Service, Protocol: b.Protocol}, addr: b.Address}] = b.Connections
		}
	}
	counted := make(map[endpointKey]bool) // each is listed for every traffic policy
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		key := endpointKey{port: lb.PortName{Port: e.Service, Protocol: e.Protocol}, addr: e.Address}
		e.Connections = counts[key]
		if e.State == goes && !counted[key] {
			counted[key] = true
			s.Connections += e.Connections
		}
	}

	return nil
}

// isSame reports whether a change makes no difference.
func (s TriedService) isSame() bool {
	return s.Outcome == "changed" && s.HealthCheck == "" && len(s.Frontends) == 0 && !slices.ContainsFunc(s.Endpoints, func(e TriedEndpoint) bool { return e.Now != e.Then || e.State == comes || e.State == goes })
}

const (
	comes = "comes"
	goes  = "goes"
)

// eachFrontend calls do with the frontends of a Service that have a port, as clients on this node and outside of it see them.
func eachFrontend(r lb.Resolution, do func(inside, outside lb.Frontend)) {
	for i := 0; i+1 < len(r.Frontends); i++ {
		if f := r.Frontends[i]; f.Key.Port != 0 && f.Key.Scope == lb.Internal {
			do(f, r.Frontends[i+1])
		}
	}
}

// tryFrontends returns the frontends that come, go or change, sorted.
func tryFrontends(before, after lb.Resolution, owners map[lb.FrontendKey]Owner) []TriedFrontend {
	type scopes struct{ inside, outside lb.Frontend }
	was, is := make(map[lb.FrontendKey]scopes), make(map[lb.FrontendKey]bool)
	tried := []TriedFrontend{}
	add := func(f lb.Frontend, outcome string) *TriedFrontend {
		tried = append(tried, TriedFrontend{
			Service: f.Port.String(), Address: netip.AddrPortFrom(f.Key.Addr, f.Key.Port), Protocol: f.Key.Protocol, Kind: f.Kind, Outcome: outcome,
		})

		return &tried[len(tried)-1]
	}
	eachFrontend(before, func(inside, outside lb.Frontend) { was[inside.Key] = scopes{inside, outside} })
	eachFrontend(after, func(inside, outside lb.Frontend) {
		is[inside.Key] = true
		former, existed := was[inside.Key]
		if !existed {
			f := add(inside, comes)
			if owner, taken := owners[inside.Key]; taken && owner.Service != inside.Port.Service {
				f.Contested, f.Yields = owner.Service.String(), owner.Yields
			}
		} else if changes := differences(former.inside, inside, former.outside, outside); changes != "" {
			add(inside, changes)
		}
	})
	for key, f := range was {
		if !is[key] {
			add(f.inside, goes)
		}
	}
	slices.SortFunc(tried, func(a, b TriedFrontend) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Kind, b.Kind), a.Address.Compare(b.Address), cmp.Compare(a.Protocol, b.Protocol))
	})

	return tried
}

// differences returns what is not the same of a frontend, apart from its backends.
func differences(was, is, wasOutside, isOutside lb.Frontend) string {
	var texts []string
	add := func(what string, before, after any) {
		if before, after := fmt.Sprint(before), fmt.Sprint(after); before != after {
			texts = append(texts, fmt.Sprintf("%s %s → %s", what, before, after))
		}
	}
	add("kind", was.Kind, is.Kind)
	add("port", was.Port.String(), is.Port.String())
	add("algorithm", was.Algorithm, is.Algorithm)
	add("affinity", was.Affinity, is.Affinity)
	add("policy inside", was.Policy, is.Policy)
	add("policy outside", wasOutside.Policy, isOutside.Policy)
	if len(wasOutside.Backends)+len(isOutside.Backends) == 0 {
		add("packets from outside", whenEmpty(0, wasOutside.PassIfEmpty, wasOutside.DropIfEmpty), whenEmpty(0, isOutside.PassIfEmpty, isOutside.DropIfEmpty))
	}
	add("source ranges", was.SourceRanges, is.SourceRanges)
	add("masquerade", wasOutside.Masquerade, isOutside.Masquerade)
	add("opted out", was.OptedOut, is.OptedOut)
	add("healing", was.Healing, is.Healing)

	return strings.Join(texts, ", ")
}

// endpointKey identifies an endpoint under one traffic policy.
type endpointKey struct {
	port   lb.PortName
	policy lb.TrafficPolicy
	addr   netip.AddrPort
}

// shares are the endpoints of a Service, and the odds of those that new connections use.
type shares struct {
	of    map[endpointKey]*lb.EndpointState
	odds  map[endpointKey]float64
	order []endpointKey
}

// sharesOf returns the endpoints under all traffic policies that frontends of the Service have.
func sharesOf(r lb.Resolution) shares {
	has := make(map[lb.PortName]map[lb.TrafficPolicy]bool)
	eachFrontend(r, func(inside, outside lb.Frontend) {
		if has[inside.Port] == nil {
			has[inside.Port] = make(map[lb.TrafficPolicy]bool)
		}
		has[inside.Port][inside.Policy], has[inside.Port][outside.Policy] = true, true
	})
	type group struct {
		port   lb.PortName
		policy lb.TrafficPolicy
		family lb.Family
	}
	used := make(map[group]int)
	s := shares{make(map[endpointKey]*lb.EndpointState), make(map[endpointKey]float64), nil}
	each := func(do func(endpointKey, group, *lb.EndpointState)) {
		for i := range r.Endpoints {
			e := &r.Endpoints[i]
			for policy := range e.Uses {
				if p := lb.TrafficPolicy(policy); has[*e.Port][p] {
					do(endpointKey{*e.Port, p, e.Addr}, group{*e.Port, p, lb.FamilyOf(e.Addr.Addr())}, e)
				}
			}
		}
	}
	each(func(key endpointKey, g group, e *lb.EndpointState) {
		s.of[key], s.order = e, append(s.order, key)
		if e.Uses[key.policy] == lb.Used {
			used[g]++
		}
	})
	each(func(key endpointKey, g group, e *lb.EndpointState) {
		if e.Uses[key.policy] == lb.Used {
			s.odds[key] = 1 / float64(used[g])
		}
	})

	return s
}

// tryEndpoints returns all endpoints of a Service, before and after a change, sorted.
func tryEndpoints(before, after lb.Resolution) []TriedEndpoint {
	was, is := sharesOf(before), sharesOf(after)
	var keys []endpointKey
	keys = append(append(keys, was.order...), is.order...)
	slices.SortFunc(keys, func(a, b endpointKey) int {
		return cmp.Or(cmp.Compare(a.port.String(), b.port.String()), cmp.Compare(a.port.Protocol, b.port.Protocol), cmp.Compare(a.policy, b.policy), a.addr.Compare(b.addr))
	})
	tried := []TriedEndpoint{}
	for _, key := range slices.Compact(keys) {
		e, state := is.of[key], ""
		switch {
		case e == nil:
			e, state = was.of[key], goes
		case was.of[key] == nil && e.Uses[key.policy] == lb.Used:
			state = comes
		case e.Uses[key.policy] != lb.Used:
			state = e.Uses[key.policy].String()
		}
		tried = append(tried, TriedEndpoint{
			Service: key.port.String(), Protocol: key.port.Protocol, Policy: key.policy.String(), Address: key.addr,
			Node: e.Place().NodeName, Zone: e.Place().Zone, Now: was.odds[key], Then: is.odds[key], State: state,
		})
	}

	return tried
}

// withoutEndpoint returns the service ports with frontends that no endpoint of any node serves.
func withoutEndpoint(r lb.Resolution) []string {
	serves := make(map[string]bool)
	eachFrontend(r, func(inside, _ lb.Frontend) { serves[inside.Port.String()] = false })
	for i := range r.Endpoints {
		if e := &r.Endpoints[i]; e.Uses[lb.Cluster] == lb.Used {
			serves[e.Port.String()] = true
		}
	}
	var without []string
	for port, served := range serves {
		if !served {
			without = append(without, port)
		}
	}
	slices.Sort(without)

	return without
}
