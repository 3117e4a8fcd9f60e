// Package lb is the model and the policy of Sluice: it makes frontends with their
// backends of Services and endpoints. It is pure: no clock, no I/O, no Kubernetes types.
//
// A [State] holds the Services and EndpointSlices, and knows which Services a change
// touches. [Resolve] makes the [Resolution] of one Service. It asks, in this order:
//
//   - which parts of the Service are within the node's [Limits], and which have no effect
//     (limits.go);
//   - which port numbers the Service has, and at which addresses (address.go);
//   - which endpoints join with a port, and which of them serve new flows under each
//     [TrafficPolicy], topology hint and termination (selection.go).
//
// [Claims] decides between Services that have a frontend in common.
package lb

import (
	"cmp"
	"net/netip"
	"slices"
	"unique"
)

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
	Port  *PortName // all endpoints of a service port share it
	Addr  netip.AddrPort
	place unique.Handle[Place]
	Local bool // on this node

	// Use is whether new flows may choose it at any frontend, and if not, why.
	Use Use
	// Uses is the same for the frontends of each [TrafficPolicy]: see [Frontend.Policy].
	Uses [2]Use

	Ready       bool
	Terminating bool

	// Alive is set if the endpoint is ready or serving: it keeps its flows, even if no
	// new flow may choose it.
	Alive bool
}

// Place returns where the endpoint is.
func (e *EndpointState) Place() Place { return placeOf(e.place) }

// Use is whether new flows may choose an endpoint, and if not, why.
type Use uint8

// The uses of an endpoint. One that only some frontends use, because of their traffic
// policy, is Used.
const (
	Used       Use = 1
	NotReady   Use = 2 // not ready and not terminating: never chosen
	NotServing Use = 3 // terminating and no longer serving
	Superseded Use = 4 // terminating and serving: only chosen if none is ready
	OtherZone  Use = 5 // hinted for other zones
	OtherNode  Use = 6 // hinted for other nodes
	NotLocal   Use = 7 // on another node, and all frontends use local endpoints only
	NoFrontend Use = 8 // the Service has no address of its family, or an earlier port has the same number
)

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

// Resolve returns the frontends of a Service, the backends that answer there, and the use
// of every endpoint. It decides as kube-proxy does.
//
// It is a pure function. Its result is in a fixed order if slices are (a [State] sorts
// them by name). It ignores slices of other Services. The result is read only and does
// not keep slices.
//
// A headless Service, one of type ExternalName and one of another proxy have no frontends. In a family in
// which the Service has no ClusterIP, it has no frontends at all, not even node ports
// and external addresses. The parts that are above the node's [Limits] are left out.
func Resolve(svc *Service, slices []*EndpointSlice, node *Node) Resolution {
	return resolve(svc, slices, node, &Memory{})
}

// Memory is what a [Resolution] takes. The zero value is ready for use. One serves many
// Services, one after the other, if no resolution is kept.
type Memory struct {
	frontends []Frontend
	endpoints []EndpointState
	served    []servedPort
	claims    []claim
	addrs     []address // of both families
	backends  []Backend // of all lists
}

// take returns an empty list with room for n elements. Lists that there is no more room for have memory of their own.
func take[T any](from *[]T, n int) []T {
	first := len(*from)
	if cap(*from)-first < n {
		*from, first = make([]T, 0, n), 0
	}
	*from = (*from)[:first+n]
	return (*from)[first : first : first+n]
}

func resolve(svc *Service, of []*EndpointSlice, node *Node, in *Memory) Resolution {
	if svc.Type == ExternalName || svc.OtherProxy || len(svc.ClusterIPs) == 0 {
		return Resolution{}
	}
	in.addrs, in.backends = in.addrs[:0], in.backends[:0]
	r := resolver{svc: svc, slices: of, node: node, memory: in}
	r.limit()
	r.checkService()
	r.checkSlices()
	r.indexSlices()
	claims := r.claims()
	addrs4, addrs6 := r.addresses(IPv4), r.addresses(IPv6)

	// Allocate the result, so that it need not grow. Only endpoints that join with a port
	// count: most endpoints of the slices may not.
	nodePorts, endpoints := 0, 0
	for _, c := range claims {
		if c.nodePort != 0 {
			nodePorts += len(svc.ClusterIPs)
		}
		for _, family := range []Family{IPv4, IPv6} {
			_, count := r.serving(c.name, family)
			endpoints += count
		}
	}
	in.frontends = slices.Grow(in.frontends[:0], scopes*((len(addrs4)+len(addrs6))*len(claims)+nodePorts+len(svc.ClusterIPs)))
	in.endpoints = slices.Grow(in.endpoints[:0], endpoints)
	r.out.Frontends, r.out.Endpoints = in.frontends, in.endpoints

	r.resolveFamily(IPv4, addrs4, claims)
	r.resolveFamily(IPv6, addrs6, claims)
	return r.out
}

// resolver is one call of [Resolve].
type resolver struct {
	svc    *Service
	slices []*EndpointSlice
	node   *Node
	memory *Memory
	served []servedPort // of slices, sorted by the fields that they join on
	out    Resolution

	// Within the node's limits:
	ports         []ServicePort
	loadBalancers int // the first ones, how many
	externalIPs   []netip.Addr
	overRanges    bool // there are too many source ranges
}

// resolveFamily makes the frontends of one family: each port of claims at each address
// and at its node port, and the catch-alls of the ClusterIP, which is the first address.
func (r *resolver) resolveFamily(family Family, addrs []address, claims []claim) {
	ranges := r.sourceRanges(family)
	for i := range claims {
		c := &claims[i]
		endpoints := selectEndpoints(r.join(&c.name, family), r.node, r.svc.wantsLocal(), r.memory)
		for _, addr := range addrs {
			if c.port == 0 || addr.restricted && ranges.overLimit || r.takesAPIServer(addr, c, endpoints.states) {
				continue
			}
			f := Frontend{Key: FrontendKey{Addr: addr.ip, Port: c.port, Protocol: c.name.Protocol}, Kind: addr.kind, Port: c.name}
			if addr.restricted {
				f.SourceRanges, f.NodeInRanges = ranges.ranges, ranges.nodeInside
			}
			r.add(f, &endpoints)
		}
		if c.nodePort != 0 && len(addrs) > 0 {
			key := FrontendKey{Addr: unspecified(family), Port: c.nodePort, Protocol: c.name.Protocol}
			r.add(Frontend{Key: key, Kind: KindNodePort, Port: c.name}, &endpoints)
		}
		for i := range endpoints.states {
			endpoints.states[i].Use = endpoints.use(&endpoints.states[i])
		}
	}
	if len(addrs) == 0 || len(claims) == 0 {
		return
	}
	for _, scope := range []Scope{Internal, External} {
		r.out.Frontends = append(r.out.Frontends, Frontend{
			Key:  FrontendKey{Addr: addrs[0].ip, Scope: scope},
			Kind: KindClusterIP,
			Port: PortName{Service: r.svc.Name},
		})
	}
}

// add adds f in both scopes, with the backends that the traffic policy of its kind allows
// there.
//
// The external traffic policy does not restrict the backends of clients inside: their
// packets do not pass a load balancer that would find a better node. But with Local,
// backends see the address of every client, inside or outside. Where this node has no endpoint, a Service may lead
// clients outside elsewhere: see [Failover].
func (r *resolver) add(f Frontend, endpoints *selection) {
	policies, passes := [...]TrafficPolicy{Internal: Cluster, External: r.svc.externalPolicy()}, false
	if f.Kind == KindClusterIP {
		policies = [...]TrafficPolicy{Internal: r.svc.internalPolicy(), External: r.svc.internalPolicy()}
	}
	all := r.node.MasqueradeAll && (f.Kind == KindClusterIP || policies[External] == Cluster)
	masqueraded := [...]bool{Internal: all, External: all}
	if f.Kind != KindClusterIP && policies[External] == Local && !endpoints.anyLocal() {
		switch {
		case r.svc.Failover == Fallback:
			policies[External], masqueraded[External] = Cluster, r.node.MasqueradeAll
		case r.svc.Failover == Passthrough && f.Kind != KindNodePort:
			passes = true
		}
	}
	f.Affinity = r.svc.Affinity
	f.OptedOut = r.svc.OptedOut
	f.Healing = r.svc.Healing
	f.Algorithm = cmp.Or(r.svc.Algorithm, r.node.Algorithm, Random)
	for _, scope := range []Scope{Internal, External} {
		f.Key.Scope = scope
		f.Policy, f.Masquerade = policies[scope], masqueraded[scope]
		f.Backends = endpoints.takeBackends(policies[scope])
		f.PassIfEmpty = passes && scope == External
		f.DropIfEmpty = len(f.Backends) == 0 && endpoints.any() && !f.PassIfEmpty
		r.out.Frontends = append(r.out.Frontends, f)
	}
}
