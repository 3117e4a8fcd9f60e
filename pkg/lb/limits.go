package lb

// Limits are how much room in the maps one Service may take, so that enough is left for all
// others. A Service within the limits must be resolved in some milliseconds. Zero is no limit.
type Limits struct {
	Frontends    int // addresses x ports x scopes, of both families
	SourceRanges int // ranges x ports, of both families
	Endpoints    int // endpoints x ports, of all slices
}

// scopes is the number of scopes in which each address and port is a frontend.
const scopes = 2

// limit leaves out the parts of the Service that are above the node's limits, before
// frontends are made of them: it counts the elements of the object's lists, duplicates
// included. The first elements are kept; ports come before load balancers' addresses, and
// these before external IPs.
func (r *resolver) limit() {
	r.ports, r.loadBalancers, r.externalIPs = r.svc.Ports, len(r.svc.LoadBalancers), r.svc.ExternalIPs
	if r.node.IgnoreExternalIPs {
		r.externalIPs = nil
	}
	limits := r.node.Limits
	if limits.Frontends > 0 {
		r.limitFrontends(limits.Frontends)
	}
	if limits.SourceRanges > 0 {
		r.limitSourceRanges(limits.SourceRanges)
	}
	if limits.Endpoints > 0 {
		r.limitEndpoints(limits.Endpoints)
	}
}

func (r *resolver) limitFrontends(limit int) {
	families := 0
	for _, family := range []Family{IPv4, IPv6} {
		if r.svc.clusterIP(family).IsValid() {
			families++
		}
	}
	used := scopes * families // the catch-alls
	for i, p := range r.ports {
		more := scopes * families
		if p.NodePort != 0 {
			more *= 2
		}
		if used+more > limit {
			r.ports = r.ports[:i]
			r.overFrontends("spec.ports[%d]", i, len(r.svc.Ports)-i, limit)
			break
		}
		used += more
	}
	if len(r.ports) == 0 {
		return
	}
	room := (limit - used) / (scopes * len(r.ports)) // addresses
	for i, lb := range r.svc.LoadBalancers {
		if lb.Proxy || !lb.Addr.IsValid() {
			continue
		}
		if room == 0 {
			r.loadBalancers = i
			r.overFrontends("status.loadBalancer.ingress[%d].ip", i, len(r.svc.LoadBalancers)-i, limit)
			break
		}
		room--
	}
	for i, ip := range r.externalIPs {
		if !ip.IsValid() {
			continue
		}
		if room == 0 {
			r.externalIPs = r.externalIPs[:i]
			r.overFrontends("spec.externalIPs[%d]", i, len(r.svc.ExternalIPs)-i, limit)
			break
		}
		room--
	}
}

// overFrontends notes that element i of a list, and all after it, are left out.
func (r *resolver) overFrontends(list string, i, count, limit int) {
	r.problemAt(list, i, "from here on %d are not in use: with them the Service would have more frontends (addresses x ports x scopes) than the %d that one may have",
		count, limit)
}

// limitSourceRanges refuses the load balancers' addresses if there are more source ranges
// than the limit. With a part of the ranges, clients of the others could not connect;
// without any, all clients could.
func (r *resolver) limitSourceRanges(limit int) {
	count := 0
	for _, family := range []Family{IPv4, IPv6} {
		count += r.countSourceRanges(family) * len(r.ports)
	}
	if count <= limit {
		return
	}
	r.overRanges = true
	r.problem("spec.loadBalancerSourceRanges", "%d (ranges x ports) are more than the %d that one Service may have: the load balancers' addresses that they restrict are not in use",
		count, limit)
}

// countSourceRanges returns how many source ranges a port has in one family, the load
// balancers' own addresses included. It is never less than the number that
// [Service.sourceRanges] returns, and zero if every client may connect.
func (r *resolver) countSourceRanges(family Family) int {
	count := 0
	for _, p := range r.svc.SourceRanges {
		if FamilyOf(p.Addr()) != family {
			continue
		}
		if p.Bits() == 0 {
			return 0
		}
		count++
	}
	if count == 0 || !r.svc.clusterIP(family).IsValid() {
		return 0
	}
	own := 0
	for _, lb := range r.svc.LoadBalancers {
		if !lb.Proxy && FamilyOf(lb.Addr) == family {
			own++
		}
	}
	if own == 0 {
		return 0 // nothing is restricted
	}
	return count + own
}

// limitEndpoints leaves out the last endpoints of the last slices. An endpoint behind no port
// of the Service does not count.
func (r *resolver) limitEndpoints(limit int) {
	most := 0
	for _, slice := range r.slices {
		most += len(slice.Endpoints) * len(slice.Ports)
	}
	if most <= limit {
		return
	}
	ports := make(map[portID[string]]struct{}, len(r.ports))
	for _, p := range r.ports {
		ports[portID[string]{p.Name, p.Protocol}] = struct{}{}
	}
	left := limit
	for i, slice := range r.slices {
		if slice.Service != r.svc.Name {
			continue
		}
		serving := 0
		for _, p := range slice.Ports {
			if _, ok := ports[portID[string]{p.Name, p.Protocol}]; ok && p.Port != 0 {
				serving++
			}
		}
		if len(slice.Endpoints)*serving <= left {
			left -= len(slice.Endpoints) * serving
			continue
		}
		part := *slice
		part.Endpoints = part.Endpoints[:left/serving]
		r.slices = append(append([]*EndpointSlice{}, r.slices[:i]...), &part)
		// The message is the same as long as there are too many: their number changes all
		// the time.
		r.problem("endpoints", "there are more than the %d (endpoints x ports) that one Service may have: those above it, of the EndpointSlices that sort last, are not in use", limit)
		return
	}
}
