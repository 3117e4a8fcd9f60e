package flow

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Flow is one flow in a list.
type Flow struct {
	Service     string         `json:"service"` // namespace/name:port
	Protocol    string         `json:"protocol"`
	Client      netip.AddrPort `json:"client"`
	OriginalDst netip.AddrPort `json:"originalDst"`
	Backend     netip.AddrPort `json:"backend"`
	// Masquerade is the source that the backend sees, if it is not the client.
	Masquerade netip.AddrPort `json:"masquerade,omitzero"`
	// StackPort is the client's port for the network stack of this node and backends on it, if another
	// flow uses the client's own.
	StackPort uint16 `json:"stackPort,omitempty"`
	// Turned reports whether the packets bypass the network stack of this node.
	Turned      bool  `json:"turned,omitempty"`
	State       State `json:"state"`
	AgeSeconds  int64 `json:"ageSeconds"`
	IdleSeconds int64 `json:"idleSeconds"` // since the last packet, up to one more
}

// List returns the flows, sorted by Service and original destination. It needs no agent. The list
// takes about half of the memory of the tables. Flows of a deleted Service have its id as the name. With a
// service (namespace/name), only its flows are listed.
func List(m *maps.Pinned, service string, now uint64) ([]Flow, error) {
	l := lister{maps: m, tables: tablesOf(m), names: make(map[uint32]name)}

	return l.list(service, now)
}

func compare(a, b Flow) int {
	return cmp.Or(
		cmp.Compare(a.Service, b.Service),
		cmp.Compare(a.Protocol, b.Protocol),
		a.OriginalDst.Compare(b.OriginalDst),
		a.Client.Compare(b.Client),
		a.Backend.Compare(b.Backend),
		a.Masquerade.Compare(b.Masquerade),
	)
}

// name is the name of a service port id.
type name struct{ service, port string }

type lister struct {
	maps   *maps.Pinned
	tables []table
	names  map[uint32]name
}

func (l *lister) list(service string, now uint64) ([]Flow, error) {
	flows := []Flow{}
	for _, t := range l.tables {
		for e, err := range t.All() {
			var f Flow
			ok := false
			if err == nil {
				f, ok, err = l.flow(t, e, service, now)
			}
			if err != nil {
				return nil, fmt.Errorf("flows: %w", err)
			}
			if ok {
				flows = append(flows, f)
			}
		}
	}
	slices.SortFunc(flows, compare)

	// A flow that moved from one table to the other was found in both.
	return slices.CompactFunc(flows, func(a, b Flow) bool { return compare(a, b) == 0 }), nil
}

// flow returns the flow of an entry, and false unless the entry is the first of the flow.
func (l *lister) flow(t table, e maps.Entry[maps.FlowKey, maps.Flow], service string, now uint64) (Flow, bool, error) {
	name, err := l.name(e.Value.ServicePortId)
	if err != nil || service != "" && name.service != service {
		return Flow{}, false, err
	}
	g, err := gather(l.tables, e.Value)
	if err != nil || len(g.entries) == 0 {
		return Flow{}, false, err
	}
	if first := g.entries[0]; first.table != t || first.key != e.Key {
		return Flow{}, false, nil
	}
	f := Flow{
		Service:     name.port,
		Protocol:    protocolName(g.flow.Proto),
		Client:      g.flow.ClientAddrPort(),
		OriginalDst: g.flow.OriginalAddrPort(),
		Backend:     g.flow.BackendAddrPort(),
		Turned:      g.isTurned(),
		State:       g.state(),
		AgeSeconds:  int64(since(g.created(), now) / time.Second),
		IdleSeconds: int64(since(g.lastSeen(), now) / time.Second),
	}
	if g.flow.IsMasqueraded() {
		f.Masquerade = g.flow.MasqueradeAddrPort()
	}
	if g.flow.StackPort != g.flow.ClientPort {
		f.StackPort = g.flow.StackAddrPort().Port()
	}

	return f, true, nil
}

// name returns the name of a service port id.
func (l *lister) name(id uint32) (name, error) {
	if n, ok := l.names[id]; ok {
		return n, nil
	}
	port, ok, err := l.maps.ServicePorts.Lookup(id)
	if err != nil {
		return name{}, err
	}
	n := name{port: fmt.Sprintf("id %d", id)}
	if ok {
		n = name{service: port.Service(), port: port.String()}
	}
	l.names[id] = n

	return n, nil
}

func protocolName(protocol uint8) string {
	switch protocol {
	case 6:
		return "TCP"
	case protoUDP:
		return "UDP"
	case 132:
		return "SCTP"
	default:
		return fmt.Sprintf("protocol %d", protocol)
	}
}
