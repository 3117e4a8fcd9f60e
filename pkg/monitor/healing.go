package monitor

import (
	"math/bits"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// healing finds what happens to suspects by looks at the map in which programs have it. Of what happens
// between two looks it finds the last.
type healing struct {
	names
	known map[uint32]maps.BackendHealth // of the last look, by the index of their ids
}

// look returns what has changed since the last look, in order; now is a time of the clock of programs.
// The first look returns of each backend since when it is a suspect, and when it was one last.
func (h *healing) look(now uint64) ([]Event, error) {
	var events []Event
	for i, is := range h.tables.Health.All() {
		was := h.known[i]
		if was.Id != is.Id {
			was = maps.BackendHealth{}
		}
		h.known[i] = is
		var changes []Event
		if is.Cleared > was.Cleared {
			changes = append(changes, Event{Time: h.at(is.Cleared), Outcome: Answers, Why: "answers again"})
		}
		why := maps.HealthCause(is.Cause).String()
		switch {
		case is.IsSuspect() && is.Suspected != was.Suspected:
			changes = append(changes, Event{
				Time: h.at(is.Suspected), Outcome: Suspect, Why: why, Until: h.at(is.Until), Clients: bits.OnesCount16(is.Clients),
			})
		case is.IsSuspect() && is.Until != was.Until && is.Until > now: // else none is passed over, as most are suspects
			changes = append(changes, Event{Time: h.at(now), Outcome: Probe, Why: why, Until: h.at(is.Until)})
		}
		b, there := h.tables.BackendOf(is.Id)
		if !there || len(changes) == 0 {
			continue
		}
		port, ok, err := h.tables.ServicePorts.Lookup(b.ServicePortId)
		if err != nil {
			return nil, err
		}
		for _, e := range changes {
			if ok {
				e.Service, e.Protocol = port.String(), lb.Protocol(port.Proto).String()
			}
			if err := h.nameBackend(&e, b); err != nil {
				return nil, err
			}
			events = append(events, e)
		}
	}
	slices.SortStableFunc(events, Event.compare)

	return events, nil
}
