package lb

import (
	"fmt"
	"net/netip"
	"slices"
)

// Problem is a part of an object that was left out, and why. The rest of the object is
// in force.
type Problem struct {
	Object  string // "Service ns/name", "EndpointSlice ns/name", …
	Field   string // "spec.externalIPs[1]"; empty: all of it
	Message string
}

func (p Problem) String() string {
	if p.Field == "" {
		return p.Object + ": " + p.Message
	}
	return fmt.Sprintf("%s: %s: %s", p.Object, p.Field, p.Message)
}

// checkService notes the parts of the Service that have no effect.
func (r *resolver) checkService() {
	s := r.svc
	for i, ip := range s.ClusterIPs {
		if ip.IsValid() && s.clusterIP(FamilyOf(ip)) != ip {
			r.problemAt("spec.clusterIPs[%d]", i, "%s is not in use: spec.ipFamilies does not have its family there", ip)
		}
	}
	r.checkExternalIPs()
	for i, lb := range s.LoadBalancers[:r.loadBalancers] {
		if !lb.Proxy {
			r.checkAddress("status.loadBalancer.ingress[%d].ip", i, lb.Addr)
		}
	}
	if s.Type == LoadBalancer && s.externalPolicy() == Local && s.HealthCheckNodePort == 0 {
		r.problem("spec.healthCheckNodePort", "missing: load balancers cannot find out which nodes have local endpoints")
	}
	r.checkSourceRanges()
}

// checkExternalIPs notes the external IPs that are not in use: all, if the node ignores
// them.
func (r *resolver) checkExternalIPs() {
	for i, ip := range r.externalIPs {
		r.checkAddress("spec.externalIPs[%d]", i, ip)
	}
	if !r.node.IgnoreExternalIPs {
		return
	}
	for i, ip := range r.svc.ExternalIPs {
		if ip.IsValid() {
			r.problemAt("spec.externalIPs[%d]", i, "%s is not in use: the feature gate AllowServiceExternalIPs is off", ip)
		}
	}
}

// checkAddress notes an address, element i of a list, if it is not in use.
func (r *resolver) checkAddress(list string, i int, ip netip.Addr) {
	switch family := FamilyOf(ip); {
	case !ip.IsValid():
	case ip.IsUnspecified():
		r.problemAt(list, i, "%s is not an address of one destination", ip)
	case !r.svc.clusterIP(family).IsValid():
		r.problemAt(list, i, "%s is not in use: the Service has no %s ClusterIP", ip, family)
	}
}

// checkSourceRanges notes the families in which every client may connect although there
// are source ranges.
func (r *resolver) checkSourceRanges() {
	if len(r.svc.SourceRanges) == 0 {
		return
	}
	for _, family := range []Family{IPv4, IPv6} {
		balanced := r.svc.clusterIP(family).IsValid() && len(r.svc.ownPrefixes(family)) > 0
		ranged := slices.ContainsFunc(r.svc.SourceRanges, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == family })
		if balanced && !ranged {
			r.problem("spec.loadBalancerSourceRanges", "none of family %s: every client may connect to the %s load balancers", family, family)
		}
	}
}

// checkSlices notes the endpoints that join has to skip.
func (r *resolver) checkSlices() {
	for _, slice := range r.slices {
		if slice.Service != r.svc.Name {
			continue
		}
		for i := range slice.Endpoints {
			if addr := slice.Endpoints[i].Addr; addr.IsValid() && FamilyOf(addr) != slice.Family {
				if r.another() {
					r.out.Problems = append(r.out.Problems, Problem{
						Object:  "EndpointSlice " + slice.Name.String(),
						Field:   fmt.Sprintf("endpoints[%d].addresses[0]", i),
						Message: fmt.Sprintf("%s is not an %s address", addr, slice.Family),
					})
				}
			}
		}
	}
}

// MaxProblems is how many problems of one object are reported. Its lists may have
// thousands of elements, and each may have a problem.
const MaxProblems = 100

// another reports whether one more problem may be added. At the limit, it adds the note
// that there are more.
func (r *resolver) another() bool {
	switch n := len(r.out.Problems); {
	case n < MaxProblems:
		return true
	case n == MaxProblems:
		r.out.Problems = append(r.out.Problems, ThereAreMore("Service "+r.svc.Name.String()))
	}
	return false
}

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
	if !r.another() {
		return
	}
	r.out.Problems = append(r.out.Problems, Problem{
		Object:  "Service " + r.svc.Name.String(),
		Field:   field,
		Message: fmt.Sprintf(format, args...),
	})
}
