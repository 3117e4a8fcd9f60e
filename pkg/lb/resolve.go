package lb

import (
	"cmp"
	"net/netip"
)

// Resolve decides what clients can dial at a Service, which backends answer
// there, and what became of every endpoint. It does so as kube-proxy does.
//
// It is a pure function, and its result is in a fixed order if slices are (a
// [State] sorts them by name). Slices of other Services are ignored. The result
// is read only and does not hold on to slices.
//
// A headless Service and one of type ExternalName have no frontends. Of a
// family in which the Service has no ClusterIP nothing exists, not even its
// node ports and external addresses. Nor does what is above the node's [Limits].
func Resolve(svc *Service, slices []*EndpointSlice, node *Node) Resolution {
	if svc.Type == ExternalName || len(svc.ClusterIPs) == 0 {
		return Resolution{}
	}
	r := resolver{svc: svc, slices: slices, node: node}
	r.limit()
	r.checkService()
	r.checkSlices()
	r.indexSlices()
	claims := r.claims()
	addrs4, addrs6 := r.addresses(IPv4), r.addresses(IPv6)
	r.allocate(claims, len(addrs4)+len(addrs6))
	r.resolveFamily(IPv4, addrs4, claims)
	r.resolveFamily(IPv6, addrs6, claims)
	return r.out
}

// resolver is one call of [Resolve].
type resolver struct {
	svc    *Service
	slices []*EndpointSlice
	node   *Node
	served []servedPort // of slices, sorted by what they join on
	out    Resolution

	// Within the node's limits:
	ports         []ServicePort
	loadBalancers int // so many of the first
	externalIPs   []netip.Addr
	overRanges    bool // there are too many source ranges
}

// resolveFamily resolves what the Service has of one family.
func (r *resolver) resolveFamily(family Family, addrs []address, claims []claim) {
	fence := r.fence(family)
	for _, c := range claims {
		endpoints := selectEndpoints(r.join(c.name, family), r.node, r.svc.wantsLocal())
		for _, addr := range addrs {
			r.dial(c, addr, fence, endpoints)
		}
		if len(addrs) > 0 {
			r.dialNodePort(c, family, endpoints)
		}
		r.report(c.name, endpoints)
	}
	if len(addrs) > 0 && len(claims) > 0 {
		r.catchAll(addrs[0])
	}
}

// dial makes the frontends of one port at one of the Service's addresses.
func (r *resolver) dial(c claim, addr address, fence fence, endpoints *selection) {
	if c.port == 0 || addr.fenced && fence.shut {
		return
	}
	f := Frontend{Key: FrontendKey{Addr: addr.ip, Port: c.port, Protocol: c.name.Protocol}, Kind: addr.kind, Port: c.name}
	if addr.fenced {
		f.SourceRanges, f.NodeInRanges = fence.ranges, fence.nodeInside
	}
	if addr.kind == KindClusterIP {
		f.Masquerade = r.node.MasqueradeAll
		policy := r.svc.internalPolicy()
		r.add(f, Internal, policy, endpoints)
		r.add(f, External, policy, endpoints)
		return
	}
	r.addExternal(f, endpoints)
}

// dialNodePort makes the frontends of one port's node port.
func (r *resolver) dialNodePort(c claim, family Family, endpoints *selection) {
	if c.nodePort == 0 {
		return
	}
	key := FrontendKey{Addr: unspecified(family), Port: c.nodePort, Protocol: c.name.Protocol}
	r.addExternal(Frontend{Key: key, Kind: KindNodePort, Port: c.name}, endpoints)
}

// addExternal adds an address that the world outside can dial. From inside,
// the external traffic policy does not bind: that traffic never leaves the
// node towards a load balancer that would find a better one. But Local promises
// the client's address to the backends, and that promise is kept to all.
func (r *resolver) addExternal(f Frontend, endpoints *selection) {
	policy := r.svc.externalPolicy()
	f.Masquerade = r.node.MasqueradeAll && policy == Cluster
	r.add(f, Internal, Cluster, endpoints)
	r.add(f, External, policy, endpoints)
}

// add adds f under a scope, with the backends that policy allows there.
func (r *resolver) add(f Frontend, scope Scope, policy TrafficPolicy, endpoints *selection) {
	f.Key.Scope = scope
	f.Affinity = r.svc.Affinity
	f.Algorithm = r.algorithm()
	f.Backends = endpoints.dial(policy)
	f.DropIfEmpty = len(f.Backends) == 0 && endpoints.any()
	r.out.Frontends = append(r.out.Frontends, f)
}

// algorithm is what chooses a backend: the Service's, or else the node's.
func (r *resolver) algorithm() Algorithm {
	return cmp.Or(r.svc.Algorithm, r.node.Algorithm, Random)
}

// catchAll makes a ClusterIP refuse what is none of the Service's ports.
func (r *resolver) catchAll(addr address) {
	for _, scope := range []Scope{Internal, External} {
		r.out.Frontends = append(r.out.Frontends, Frontend{
			Key:  FrontendKey{Addr: addr.ip, Scope: scope},
			Kind: KindClusterIP,
			Port: PortName{Service: r.svc.Name},
		})
	}
}

// report says what became of the endpoints of one port.
func (r *resolver) report(port PortName, endpoints *selection) {
	for i := range endpoints.candidates {
		e := &endpoints.candidates[i]
		place := e.place()
		r.out.Endpoints = append(r.out.Endpoints, EndpointState{
			Port:     port,
			Addr:     e.addr,
			NodeName: place.NodeName,
			Zone:     place.Zone,
			Local:    e.local,
			Use:      endpoints.use(e),
			Ready:    e.Ready,
			Alive:    e.Ready || e.Serving,
		})
	}
}

// allocate makes room for what claims lead to at so many addresses. It counts what
// joins and not what the slices have: most of that may be no port of the Service.
func (r *resolver) allocate(claims []claim, addrs int) {
	nodePorts, endpoints := 0, 0
	for _, c := range claims {
		if c.nodePort != 0 {
			nodePorts += len(r.svc.ClusterIPs)
		}
		for _, family := range []Family{IPv4, IPv6} {
			_, count := r.serving(c.name, family)
			endpoints += count
		}
	}
	r.out.Frontends = make([]Frontend, 0, 2*(addrs*len(claims)+nodePorts+len(r.svc.ClusterIPs)))
	r.out.Endpoints = make([]EndpointState, 0, endpoints)
}
