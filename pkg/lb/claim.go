package lb

// claim is a service port and the numbers that clients dial for it. A number
// that another port of the Service has is zero.
type claim struct {
	name     PortName
	port     uint16 // at the Service's addresses
	nodePort uint16 // at the node's; zero: none
}

// portID is what the ports of a Service must not have in common: a name, or a
// number, each with its protocol.
type portID[T string | uint16] struct {
	id       T
	protocol Protocol
}

// claims returns the ports of the Service. Of two that want the same number,
// the first has it.
func (r *resolver) claims() []claim {
	claims := make([]claim, 0, len(r.ports))
	names := make(map[portID[string]]struct{})
	ports := make(map[portID[uint16]]string) // the name of the port that has the number
	nodePorts := make(map[portID[uint16]]string)
	for i, p := range r.ports {
		if !r.checkPort(i, p, names) {
			continue
		}
		names[portID[string]{p.Name, p.Protocol}] = struct{}{}
		claims = append(claims, claim{
			name:     PortName{Service: r.svc.Name, Port: p.Name, Protocol: p.Protocol},
			port:     r.unclaimed(i, "port", p, p.Port, ports),
			nodePort: r.unclaimed(i, "nodePort", p, p.NodePort, nodePorts),
		})
	}
	return claims
}

// checkPort says whether p, the port at index i, can be a port at all. Earlier are
// the names of those before it.
func (r *resolver) checkPort(i int, p ServicePort, earlier map[portID[string]]struct{}) bool {
	_, named := earlier[portID[string]{p.Name, p.Protocol}]
	switch {
	case p.Port == 0:
		r.problemAt("spec.ports[%d].port", i, "must not be zero")
	case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
		r.problemAt("spec.ports[%d].protocol", i, "neither TCP nor UDP nor SCTP")
	case named:
		r.problemAt("spec.ports[%d].name", i, "an earlier port has the name %q too", p.Name)
	default:
		return true
	}
	return false
}

// unclaimed returns the number that p, the port at index i, wants, or zero if an
// earlier port of the same protocol has it. It enters p in earlier.
func (r *resolver) unclaimed(i int, field string, p ServicePort, want uint16, earlier map[portID[uint16]]string) uint16 {
	if want == 0 {
		return 0
	}
	number := portID[uint16]{want, p.Protocol}
	if owner, claimed := earlier[number]; claimed {
		r.problemAt("spec.ports[%d]."+field, i, "%d/%s is that of port %q already", want, p.Protocol, owner)
		return 0
	}
	earlier[number] = p.Name
	return want
}
