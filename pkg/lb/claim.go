package lb

import (
	"fmt"
	"slices"
)

// claim is a service port and the numbers that clients dial for it. A number
// that another port of the Service has is zero.
type claim struct {
	name     PortName
	port     uint16 // at the Service's addresses
	nodePort uint16 // at the node's; zero: none
}

// claims returns the ports of the Service. Of two that want the same number,
// the first has it.
func (r *resolver) claims() []claim {
	claims := make([]claim, 0, len(r.svc.Ports))
	for i, p := range r.svc.Ports {
		c := claim{
			name:     PortName{Service: r.svc.Name, Port: p.Name, Protocol: p.Protocol},
			port:     p.Port,
			nodePort: p.NodePort,
		}
		if r.checkPort(i, p, claims) {
			c.port = r.unclaimed(i, "port", c, claims, func(c claim) uint16 { return c.port })
			c.nodePort = r.unclaimed(i, "nodePort", c, claims, func(c claim) uint16 { return c.nodePort })
			claims = append(claims, c)
		}
	}
	return claims
}

// checkPort says whether p, the port at index i, can be a port at all.
func (r *resolver) checkPort(i int, p ServicePort, earlier []claim) bool {
	sameName := func(c claim) bool { return c.name.Port == p.Name && c.name.Protocol == p.Protocol }
	switch {
	case p.Port == 0:
		r.problem(fmt.Sprintf("spec.ports[%d].port", i), "must not be zero")
	case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
		r.problem(fmt.Sprintf("spec.ports[%d].protocol", i), "neither TCP nor UDP nor SCTP")
	case slices.ContainsFunc(earlier, sameName):
		r.problem(fmt.Sprintf("spec.ports[%d].name", i), "an earlier port has the name %q too", p.Name)
	default:
		return true
	}
	return false
}

// unclaimed returns number(c), or zero if an earlier port of the same protocol
// has it.
func (r *resolver) unclaimed(i int, field string, c claim, earlier []claim, number func(claim) uint16) uint16 {
	want := number(c)
	if want == 0 {
		return 0
	}
	for _, e := range earlier {
		if e.name.Protocol == c.name.Protocol && number(e) == want {
			r.problem(fmt.Sprintf("spec.ports[%d].%s", i, field), "%d/%s is that of port %q already", want, c.name.Protocol, e.name.Port)
			return 0
		}
	}
	return want
}
