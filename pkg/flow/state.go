package flow

import "github.com/sluice-lb/sluice/maps"

// State is what a flow has come to, by all of its entries.
type State string

// The states of TCP and SCTP flows, and of UDP flows.
const (
	Opening     State = "opening"     // the client has not sent a second packet
	Established State = "established" //
	Closing     State = "closing"     // one side has said its last, and the other knows
	Closed      State = "closed"      // both have, or one has reset the other

	Unanswered State = "unanswered" // the backend has not sent anything
	Answered   State = "answered"   //
)

const protoUDP = 17

// isProven says that a connection is one, by an entry that is half open still: flows may have had no
// room for it. A UDP flow without room is as good as unanswered.
func isProven(f *maps.Flow) bool {
	return f.Proto != protoUDP && f.Role == maps.FlowFromClient && (f.State == maps.FlowOpen || f.State == maps.FlowFin)
}

// state merges what the entries say. Either side's packets pass two entries if
// the flow is masqueraded, so two that have seen the last of a side need not be
// of both sides.
func (g *group) state() State {
	proven, over := false, false
	var saidLast struct{ client, backend bool }
	for _, e := range g.entries {
		proven = proven || !e.table.halfOpen || isProven(&e.value)
		over = over || e.value.Ending&maps.FlowOver != 0
		switch e.value.State {
		case maps.FlowReset:
			over = true
		case maps.FlowFin:
			fromClient := e.value.Role == maps.FlowFromClient || e.value.Role == maps.FlowToBackend
			saidLast.client = saidLast.client || fromClient
			saidLast.backend = saidLast.backend || !fromClient
		}
	}
	switch {
	case g.told.Proto == protoUDP && proven:
		return Answered
	case g.told.Proto == protoUDP:
		return Unanswered
	case over, saidLast.client && saidLast.backend:
		return Closed
	case saidLast.client || saidLast.backend:
		return Closing
	case proven:
		return Established
	default:
		return Opening
	}
}
