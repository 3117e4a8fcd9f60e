package flow

import "github.com/sluice-lb/sluice/maps"

// State is the state of a flow, by all of its entries.
type State string

// The states of TCP and SCTP flows, then those of UDP flows.
const (
	Opening     State = "opening"     // the client has not sent a second packet
	Established State = "established" //
	Closing     State = "closing"     // one side has sent a FIN that the other acknowledged
	Closed      State = "closed"      // both have, or the connection was reset

	Unanswered State = "unanswered" // the backend has not sent anything
	Answered   State = "answered"   //
)

const protoUDP = 17

// isAssured reports whether an entry in half_open belongs to an assured connection: the map flows may
// have had no room for it. A UDP flow without room counts as unanswered.
func isAssured(f *maps.Flow) bool {
	return f.Proto != protoUDP && f.Role == maps.FlowFromClient && (f.State == maps.FlowOpen || f.State == maps.FlowFin)
}

// state returns the state that the entries have together. Packets of either side use two entries if the
// flow is masqueraded, so two entries with a FIN may be of the same side.
func (g *group) state() State {
	assured, over := false, false
	var finSeen struct{ client, backend bool }
	for _, e := range g.entries {
		assured = assured || !e.table.halfOpen || isAssured(&e.value)
		over = over || e.value.Ending&maps.FlowOver != 0
		switch e.value.State {
		case maps.FlowReset:
			over = true
		case maps.FlowFin:
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
	case finSeen.client || finSeen.backend:
		return Closing
	case assured:
		return Established
	default:
		return Opening
	}
}
