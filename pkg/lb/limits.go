package lb

import (
	"fmt"
	"net/netip"
	"slices"
)

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
	if limit := r.node.Limits.Frontends; limit > 0 {
		r.limitFrontends(limit)
	}
	if limit := r.node.Limits.SourceRanges; limit > 0 {
		r.limitSourceRanges(limit)
	}
	if limit := r.node.Limits.Endpoints; limit > 0 {
		r.limitEndpoints(limit)
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
// [resolver.sourceRanges] returns, and zero if every client may connect.
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

// Problem is something that an object or the configuration of this node names, and that is not in
// force, and why. The rest is in force.
type Problem struct {
	Object  string // "Service ns/name", "EndpointSlice ns/name", …, or [Configuration]
	Field   string // "spec.externalIPs[1]"; empty: all of it
	Message string
	// Value is what the field has, empty if the message quotes it. Remedy is a sentence about what to
	// do, empty if that is to correct the field.
	Value  string `json:",omitempty"`
	Remedy string `json:",omitempty"`
	Effect Effect `json:",omitempty"`
}

// Configuration is the object of problems with the flags and the configuration file of this node.
const Configuration = "configuration"

// Effect is what a problem means for this node.
type Effect string

// The effects.
const (
	LeftOut  Effect = ""         // the object alone is concerned: this node does all that it should
	Degraded Effect = "degraded" // this node does not do all that it should
	Failing  Effect = "failing"  // so much that connections fail
)

func (p Problem) String() string {
	text := p.Object
	if p.Field != "" {
		text += ": " + p.Field
	}
	if p.Value != "" {
		text += " " + p.Value
	}
	text += ": " + p.Message
	if p.Remedy != "" {
		text += ". " + p.Remedy
	}
	return text
}

// checkService notes the parts of the Service that have no effect, and source ranges that
// leave a family open to every client.
func (r *resolver) checkService() {
	s := r.svc
	for i, ip := range s.ClusterIPs {
		switch {
		case !ip.IsValid() || s.clusterIP(FamilyOf(ip)) == ip:
		case IsSpecial(ip):
			r.specialAddress("spec.clusterIPs[%d]", i, ip)
		default:
			r.problemAt("spec.clusterIPs[%d]", i, "%s is not in use: spec.ipFamilies does not have its family there", ip)
		}
	}
	for i, ip := range r.externalIPs {
		r.checkAddress("spec.externalIPs[%d]", i, ip)
	}
	for i, ip := range s.ExternalIPs {
		if r.node.IgnoreExternalIPs && ip.IsValid() {
			r.problemAt("spec.externalIPs[%d]", i, "%s is not in use: the feature gate AllowServiceExternalIPs is off", ip)
		}
	}
	for i, lb := range s.LoadBalancers[:r.loadBalancers] {
		if !lb.Proxy {
			r.checkAddress("status.loadBalancer.ingress[%d].ip", i, lb.Addr)
		}
	}
	if s.Type == LoadBalancer && s.externalPolicy() == Local && s.HealthCheckNodePort == 0 {
		r.problem("spec.healthCheckNodePort", "missing: load balancers cannot find out which nodes have local endpoints")
	}
	for _, family := range []Family{IPv4, IPv6} {
		ranged := slices.ContainsFunc(s.SourceRanges, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == family })
		if len(s.SourceRanges) > 0 && !ranged && s.clusterIP(family).IsValid() && len(s.ownPrefixes(family)) > 0 {
			r.problem("spec.loadBalancerSourceRanges", "none of family %s: every client may connect to the %s load balancers", family, family)
		}
	}
}

// checkAddress notes an address, element i of a list, if it is not in use.
func (r *resolver) checkAddress(list string, i int, ip netip.Addr) {
	switch family := FamilyOf(ip); {
	case !ip.IsValid():
	case IsSpecial(ip):
		r.specialAddress(list, i, ip)
	case !r.svc.clusterIP(family).IsValid():
		r.problemAt(list, i, "%s is not in use: the Service has no %s ClusterIP", ip, family)
	}
}

// specialAddress notes an address, element i of a list, that no Service has.
func (r *resolver) specialAddress(list string, i int, ip netip.Addr) {
	r.problemAt(list, i, "%s is not in use: an unspecified, loopback, link-local, multicast or broadcast address means another destination in each network namespace", ip)
}

// checkSlices notes the endpoints that join has to skip.
func (r *resolver) checkSlices() {
	for _, slice := range r.slices {
		if slice.Service != r.svc.Name {
			continue
		}
		for i := range slice.Endpoints {
			if addr := slice.Endpoints[i].Addr; addr.IsValid() && FamilyOf(addr) != slice.Family {
				r.note("EndpointSlice "+slice.Name.String(), fmt.Sprintf("endpoints[%d].addresses[0]", i),
					"%s is not an %s address", addr, slice.Family)
			}
		}
	}
}

// MaxProblems is how many problems of one object are reported. Its lists may have
// thousands of elements, and each may have a problem.
const MaxProblems = 100

// ThereAreMore returns the problem that follows the first [MaxProblems] of an object.
func ThereAreMore(object string) Problem {
	return Problem{Object: object, Message: fmt.Sprintf("there are more problems than these %d", MaxProblems)}
}

// problemAt notes that element i of a list is left out. The list is the format of a field.
func (r *resolver) problemAt(list string, i int, format string, args ...any) {
	if len(r.out.Problems) < MaxProblems {
		list = fmt.Sprintf(list, i)
	}
	r.problem(list, format, args...)
}

// problem notes that a part of the Service is left out.
func (r *resolver) problem(field, format string, args ...any) {
	if len(r.out.Problems) > MaxProblems {
		return // without making a name that is not used
	}
	r.note("Service "+r.svc.Name.String(), field, format, args...)
}

// note adds a problem of an object, up to [MaxProblems].
func (r *resolver) note(object, field, format string, args ...any) {
	switch n := len(r.out.Problems); {
	case n < MaxProblems:
		r.out.Problems = append(r.out.Problems, Problem{Object: object, Field: field, Message: fmt.Sprintf(format, args...)})
	case n == MaxProblems:
		r.out.Problems = append(r.out.Problems, ThereAreMore("Service "+r.svc.Name.String()))
	}
}
