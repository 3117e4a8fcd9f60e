package lb

import (
	"cmp"
	"net/netip"
)

// Resolve returns the frontends of a Service, the backends that answer there, and the use
// of every endpoint. It decides as kube-proxy does.
//
// It is a pure function. Its result is in a fixed order if slices are (a [State] sorts
// them by name). It ignores slices of other Services. The result is read only and does
// not keep slices.
//
// A headless Service and one of type ExternalName have no frontends. In a family in
// which the Service has no ClusterIP, it has no frontends at all, not even node ports
// and external addresses. The parts that are above the node's [Limits] are left out.
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
	served []servedPort // of slices, sorted by the fields that they join on
	out    Resolution

	// Within the node's limits:
	ports         []ServicePort
	loadBalancers int // the first ones, how many
	externalIPs   []netip.Addr
	overRanges    bool // there are too many source ranges
}

// resolveFamily makes the frontends of one family.
func (r *resolver) resolveFamily(family Family, addrs []address, claims []claim) {
	ranges := r.sourceRanges(family)
	for _, c := range claims {
		endpoints := selectEndpoints(r.join(c.name, family), r.node, r.svc.wantsLocal())
		for _, addr := range addrs {
			r.addAddress(c, addr, ranges, endpoints)
		}
		if len(addrs) > 0 {
			r.addNodePort(c, family, endpoints)
		}
		r.report(c.name, endpoints)
	}
	if len(addrs) > 0 && len(claims) > 0 {
		r.catchAll(addrs[0])
	}
}

// addAddress makes the frontends of one port at one of the Service's addresses.
func (r *resolver) addAddress(c claim, addr address, ranges sourceRanges, endpoints *selection) {
	if c.port == 0 || addr.restricted && ranges.overLimit {
		return
	}
	f := Frontend{Key: FrontendKey{Addr: addr.ip, Port: c.port, Protocol: c.name.Protocol}, Kind: addr.kind, Port: c.name}
	if addr.restricted {
		f.SourceRanges, f.NodeInRanges = ranges.ranges, ranges.nodeInside
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

// addNodePort makes the frontends of one port's node port.
func (r *resolver) addNodePort(c claim, family Family, endpoints *selection) {
	if c.nodePort == 0 {
		return
	}
	key := FrontendKey{Addr: unspecified(family), Port: c.nodePort, Protocol: c.name.Protocol}
	r.addExternal(Frontend{Key: key, Kind: KindNodePort, Port: c.name}, endpoints)
}

// addExternal adds an address that clients outside the cluster can reach. For clients
// inside, the external traffic policy does not restrict the backends: their packets do
// not pass a load balancer that would find a better node. But with Local, backends see
// the address of every client, inside or outside.
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
	f.Backends = endpoints.takeBackends(policy)
	f.DropIfEmpty = len(f.Backends) == 0 && endpoints.any()
	r.out.Frontends = append(r.out.Frontends, f)
}

// algorithm returns the Service's algorithm, or else the node's.
func (r *resolver) algorithm() Algorithm {
	return cmp.Or(r.svc.Algorithm, r.node.Algorithm, Random)
}

// catchAll makes the frontends by which a ClusterIP refuses ports that the Service does not have.
func (r *resolver) catchAll(addr address) {
	for _, scope := range []Scope{Internal, External} {
		r.out.Frontends = append(r.out.Frontends, Frontend{
			Key:  FrontendKey{Addr: addr.ip, Scope: scope},
			Kind: KindClusterIP,
			Port: PortName{Service: r.svc.Name},
		})
	}
}

// report adds the endpoints of one port to the result.
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

// allocate makes room for the result, so that it need not grow. It counts the endpoints
// that join with a port: most endpoints of the slices may not.
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
