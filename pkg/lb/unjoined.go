package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unique"
)

// Unjoined is an endpoint of a Service that is not behind one of its ports.
type Unjoined struct {
	Addr  netip.AddrPort // port 0 if its slice has none
	place unique.Handle[Place]
	Local bool   // on this node
	Why   string // what keeps it out, after a number: "2 of an EndpointSlice …"
}

// Place returns where the endpoint is.
func (u Unjoined) Place() Place { return placeOf(u.place) }

// Unjoined returns the endpoints of the Service's slices that are not behind a port in one family: their slices have no
// port of that name and protocol, or there are only slices of the other family.
func (s Snapshot) Unjoined(port PortName, family Family) []Unjoined {
	serves := func(p EndpointPort) bool { return p.Name == port.Port && p.Protocol == port.Protocol }
	joined := make(map[netip.Addr]bool)
	ofFamily := false
	for _, slice := range s.slices {
		if slice.Family != family {
			continue
		}
		ofFamily = ofFamily || len(slice.Endpoints) > 0
		joins := slices.ContainsFunc(slice.Ports, serves)
		for _, e := range slice.Endpoints {
			joined[e.Addr] = joined[e.Addr] || joins
		}
	}
	var out []Unjoined
	for _, slice := range s.slices {
		if ofFamily != (slice.Family == family) {
			continue
		}
		why := fmt.Sprintf("of an EndpointSlice for %s, and none is for %s", slice.Family, family)
		if ofFamily {
			why = fmt.Sprintf("of an EndpointSlice without the port %s: %s", portText(port.Port, port.Protocol), slice.portsText())
		}
		for _, e := range slice.Endpoints {
			if joined[e.Addr] {
				continue
			}
			joined[e.Addr] = true
			number := uint16(0)
			if len(slice.Ports) > 0 {
				number = slice.Ports[0].Port
			}
			node := placeOf(e.Place).NodeName
			out = append(out, Unjoined{netip.AddrPortFrom(e.Addr, number), e.Place, node != "" && node == s.node.Name, why})
		}
	}
	slices.SortFunc(out, func(a, b Unjoined) int { return a.Addr.Compare(b.Addr) })
	return out
}

// portText names a port as slices and Services do: by its name and protocol.
func portText(name string, protocol Protocol) string {
	if name == "" {
		return "without a name/" + protocol.String()
	}
	return name + "/" + protocol.String()
}

// listedPorts is how many ports of a slice are listed: each endpoint has the text.
const listedPorts = 5

// portsText lists the ports of the slice.
func (e *EndpointSlice) portsText() string {
	if len(e.Ports) == 0 {
		return "it has no ports"
	}
	var texts []string
	for _, p := range e.Ports[:min(len(e.Ports), listedPorts)] {
		texts = append(texts, fmt.Sprintf("%s %d", portText(p.Name, p.Protocol), p.Port))
	}
	if more := len(e.Ports) - listedPorts; more > 0 {
		texts = append(texts, fmt.Sprintf("and %d more", more))
	}
	return "it has " + strings.Join(texts, ", ")
}
