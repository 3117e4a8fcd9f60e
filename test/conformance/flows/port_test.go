package flows

// portsOfWorld is how many ports of clients are used in one world, unless a single
// flow needs more. So many flows fit into the tables of an agent of a test. What
// Sluice and the kernel know of them ends with the world: no port is used twice.
const portsOfWorld = 4000

// clientPorts are those that a client beyond a device may have: not privileged, no
// node ports, none that the kernel hands out, and none where a server may listen.
func (s *scenario) clientPorts() []uint16 {
	const last, handedOut, nodePorts, privileged = 65535, 60999, 30000, 1023
	serves := map[uint16]bool{}
	for _, target := range s.targets() {
		serves[target.Port()] = true
	}
	for _, f := range s.Flows {
		serves[f.DestPort] = true
	}
	var ports []uint16
	for port := uint16(last); port > privileged; port-- {
		if (port < nodePorts || port > handedOut) && !serves[port] {
			ports = append(ports, port)
		}
	}

	return ports
}

// parts divides a scenario by its flows, in their order: each part is the whole
// scenario with some of them, which need at most so many ports. One that needs more
// is a part of its own.
func (s *scenario) parts(ports int) []scenario {
	part, room := *s, ports
	part.Flows = nil
	var parts []scenario
	for _, f := range s.Flows {
		need := s.portsFor(f)
		if need > room && len(part.Flows) > 0 {
			parts = append(parts, part)
			part.Flows, room = nil, ports
		}
		part.Flows = append(part.Flows, f)
		room -= need
	}

	return append(parts, part)
}

// portsFor is how many ports a flow needs: one for each attempt whose packets come
// by a device.
func (s *scenario) portsFor(f flow) int {
	need := 0
	for _, p := range s.paths(f) {
		if !p.socket {
			need += attempts(len(s.expect(f, p).outcomes))
		}
	}

	return need
}
