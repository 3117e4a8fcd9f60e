// Package flow lists and ends the flows that device programs create: idle flows after a timeout
// that depends on their state, and UDP flows whose backend or frontend is gone. It also reports how
// full the tables are, and how many entries were evicted.
//
// A flow is two or four entries of the maps flows, half_open and unanswered, and each entry
// describes the whole flow (flow_types.h draws the roles). When a flow is masqueraded it may grow from
// two entries to four, so all four are looked up. Different packets use different entries, so none
// of them alone shows whether the flow is idle, or its state. A [Sweeper] therefore decides about
// whole flows, from the content of all their entries right before it deletes them: all or none.
//
// Programs run meanwhile. A packet may hit a flow between the last read and the deletes, some
// microseconds, after minutes or hours without one; for UDP it creates the flow again, which may
// have another backend, for TCP it passes untranslated.
package flow

import (
	"iter"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// since returns how much later now is than then, zero if it is earlier: programs may stamp a flow after
// the clock was read.
func since(then, now uint64) time.Duration {
	if now < then {
		return 0
	}

	return time.Duration(now - then)
}

// entries is a map of flows. [maps.Map] is the kernel's; a test's changes between two calls.
type entries interface {
	All() iter.Seq2[maps.Entry[maps.FlowKey, maps.Flow], error]
	Lookup(maps.FlowKey) (maps.Flow, bool, error)
	Remove(maps.FlowKey) (bool, error)
}

// table is one of the maps that contain flows.
type table struct {
	entries
	halfOpen bool
}

// tablesOf returns all tables in the order in which they must be read so that no flow is missed: flows
// only move to the last one, and are written there before they are deleted elsewhere.
func tablesOf(m *maps.Pinned) []table {
	return []table{{m.HalfOpen, true}, {m.Unanswered, true}, {m.Flows, false}}
}

// entry is one entry of a flow.
type entry struct {
	table table
	key   maps.FlowKey
	value maps.Flow
}

// group is one flow: its entries, as read just now.
type group struct {
	entries []entry
	flow    maps.Flow // as the most complete entry describes it
}

var roles = [...]uint8{maps.FlowFromClient, maps.FlowToClient, maps.FlowToBackend, maps.FlowFromBackend}

// gather reads all entries of a flow. There may be none any more.
func gather(tables []table, flow maps.Flow) (group, error) {
	g := group{entries: make([]entry, 0, len(roles)), flow: flow}
	for _, role := range roles {
		masquerade := role == maps.FlowToBackend || role == maps.FlowFromBackend
		if masquerade && !g.flow.IsMasqueraded() {
			continue
		}
		key := g.flow.Key(role)
		for _, t := range tables {
			v, ok, err := t.Lookup(key)
			if err != nil {
				return g, err
			}
			if ok && isSame(v, g.flow) {
				g.entries = append(g.entries, entry{t, key, v})
				if v.IsMasqueraded() {
					g.flow = v
				}
			}
		}
	}

	return g, nil
}

// isSame reports whether two entries are of one flow. An entry that was written before the flow was
// masqueraded has no masquerade address.
func isSame(a, b maps.Flow) bool {
	if !a.IsMasqueraded() || !b.IsMasqueraded() {
		b.Masquerade, b.MasqueradePort, b.Flags = a.Masquerade, a.MasqueradePort, a.Flags
	}

	return identity(a) == identity(b)
}

// identity returns what all entries of a flow have in common, which is enough to find them. The flag of a
// process of this node decides at which hooks they are.
func identity(f maps.Flow) maps.Flow {
	if f.IsOfNode() {
		f.Flags &= maps.FlowOfNode | maps.FlowMasqueraded
	} else {
		f.Flags &= maps.FlowMasqueraded
	}
	f.Role, f.State, f.Ending, f.Stamp, f.Created, f.LastSeen, f.Bytes, f.End, f.Ack = 0, 0, 0, 0, 0, 0, 0, 0, 0

	return f
}

// lastSeen returns when the last packet of any entry was seen, up to [refresh] earlier.
func (g *group) lastSeen() uint64 {
	var last uint64
	for _, e := range g.entries {
		last = max(last, e.value.LastSeen)
	}

	return last
}

// created returns when the flow began: entries of an earlier flow from the same client port may be
// left.
func (g *group) created() uint64 {
	var created uint64
	for _, e := range g.entries {
		created = max(created, e.value.Created)
	}

	return created
}

// isTurned reports whether no packet of the flow passes the network stack of the node.
func (g *group) isTurned() bool {
	return !slices.ContainsFunc(g.entries, func(e entry) bool { return !e.value.IsTurned() })
}

// State is the state of a flow, by all of its entries.
type State string

// The states of TCP and SCTP flows, then those of UDP flows.
const (
	Opening     State = "opening"     // the client has not sent a second packet
	Established State = "established" //
	Closing     State = "closing"     // one side has sent a FIN that the other acknowledged, or an RST that it need not have accepted
	Closed      State = "closed"      // both have, or the connection was reset

	Unanswered State = "unanswered" // the backend has not sent anything
	Answered   State = "answered"   //
)

const (
	protoTCP = 6
	protoUDP = 17
)

// isAssured reports whether an entry in half_open belongs to an assured connection: the map flows may
// have had no room for it. A UDP flow without room counts as unanswered.
func isAssured(f *maps.Flow) bool {
	return f.Proto != protoUDP && f.Role == maps.FlowFromClient && (f.State == maps.FlowOpen || f.State == maps.FlowFin)
}

// isReset reports whether a side has reset the flow, and the other side must have accepted that. With TCP, that is so
// if the flow is over.
func isReset(f *maps.Flow) bool { return f.Proto != protoTCP && f.State == maps.FlowReset }

// state returns the state that the entries have together. Packets of either side use two entries if the
// flow is masqueraded, so two entries with a FIN may be of the same side. A reset that may be forged ends no flow
// of TCP, whatever the other side has sent.
func (g *group) state() State {
	assured, over, reset := false, false, false
	var finSeen struct{ client, backend bool }
	for _, e := range g.entries {
		assured = assured || !e.table.halfOpen || isAssured(&e.value)
		over = over || e.value.Ending&maps.FlowOver != 0 || isReset(&e.value)
		switch {
		case e.value.State == maps.FlowReset && e.value.Proto == protoTCP:
			reset = true
		case e.value.State == maps.FlowReset, e.value.State == maps.FlowFin:
			fromClient := e.value.Role == maps.FlowFromClient || e.value.Role == maps.FlowToBackend
			finSeen.client = finSeen.client || fromClient
			finSeen.backend = finSeen.backend || !fromClient
		}
	}
	switch {
	case g.flow.Proto == protoUDP && assured:
		return Answered
	case g.flow.Proto == protoUDP:
		return Unanswered
	case over, finSeen.client && finSeen.backend:
		return Closed
	case reset || finSeen.client || finSeen.backend:
		return Closing
	case assured:
		return Established
	default:
		return Opening
	}
}
