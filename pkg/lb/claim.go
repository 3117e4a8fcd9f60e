package lb

// claim is a service port and the port numbers at which clients reach it. A number
// that an earlier port of the Service has is zero here.
type claim struct {
	name     PortName
	port     uint16 // at the Service's addresses
	nodePort uint16 // at the node's; zero: none
}

// portID is what identifies a port of a Service: its name or its number, each with the
// protocol. No two ports may have one in common.
type portID[T string | uint16] struct {
	id       T
	protocol Protocol
}

// claims returns the ports of the Service. Of two ports with the same number,
// the first gets it.
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

// checkPort reports whether p, the port at index i, is valid, and notes a problem if it
// is not. The names of the ports before it are in earlier.
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

// unclaimed returns want, a number of p, the port at index i, or zero if an earlier port
// of the same protocol has it. It adds p to earlier.
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
