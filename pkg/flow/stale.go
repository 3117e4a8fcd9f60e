package flow

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// lateAnswers is how long a backend that is gone may still answer what it was asked
// before.
const lateAnswers = 50 * time.Millisecond

// EndStale ends the UDP flows whose backend is gone, or which were dialled at
// what does not lead to their service port any more, and no others: a client
// that goes on sending is sent to whoever answers now. What was asked before is
// still answered: the way back goes last, 50 ms later. It returns how many it
// ended, also next to an error.
//
// Connections of TCP and SCTP are left alone, as kube-proxy leaves them; so are
// flows to a backend that gets no new ones but is still among the backends. A
// flow does not tell in which scope it was dialled: it stays if either scope
// leads to its service port.
func (s *Sweeper) EndStale() (int, error) {
	ended := 0
	for {
		stale, err := s.findStale()
		if err != nil {
			return ended, fmt.Errorf("stale flows: %w", err)
		}
		for f, e := range stale {
			if err := s.turnAway(f, e); err != nil {
				return ended, fmt.Errorf("stale flow: %w", err)
			}
		}
		if len(stale) > 0 {
			time.Sleep(lateAnswers)
		}
		n := 0
		for f, e := range stale {
			if err := s.endStale(f, e); err != nil {
				return ended, fmt.Errorf("stale flow: %w", err)
			}
			if e.ended {
				n++
				s.ended.add(f.Dialled)
			}
		}
		ended += n
		s.status.Stale += uint64(n)
		if n == 0 || len(stale) < atOnce {
			return ended, nil
		}
	}
}

// lead is where a flow goes, and by way of what.
type lead struct {
	dialled, backend         maps.Addr
	dialledPort, backendPort uint16
	servicePortID, backendID uint32
}

func leadOf(f *maps.Flow) lead {
	return lead{
		dialled: f.Dialled, dialledPort: f.DialledPort, servicePortID: f.ServicePortId,
		backend: f.Backend, backendPort: f.BackendPort, backendID: f.BackendId,
	}
}

// ending is what has been done about a stale flow.
type ending struct {
	ended   bool // some entry was deleted
	counted bool // it was taken out of its backend's load, once however often a packet puts it back
}

// findStale returns the identities of flows that seem to be stale.
func (s *Sweeper) findStale() (map[maps.Flow]*ending, error) {
	stale := make(map[maps.Flow]*ending)
	known := make(map[lead]bool)
	for _, t := range s.tables {
		for e, err := range t.All() {
			if err != nil {
				return nil, err
			}
			if e.Value.Proto != protoUDP {
				continue
			}
			l := leadOf(&e.Value)
			stays, ok := known[l]
			if !ok {
				if stays, err = s.stands(l); err != nil {
					return nil, err
				}
				known[l] = stays
			}
			if !stays && len(stale) < atOnce {
				stale[identity(e.Value)] = new(ending)
			}
		}
	}

	return stale, nil
}

// turnAway has what the client of the flow that f tells sends next begin another flow.
// What was found stale may have come back meanwhile.
func (s *Sweeper) turnAway(f maps.Flow, so *ending) error {
	if stays, err := s.stands(leadOf(&f)); err != nil || stays {
		return err
	}
	g, err := gather(s.tables, f)
	if err != nil {
		return err
	}
	g.entries = slices.DeleteFunc(g.entries, func(e entry) bool { return e.value.Role != maps.FlowFromClient })

	return s.removeStale(&g, so)
}

// endStale ends the flow that f tells. What was found stale may have come back
// meanwhile. A packet may put entries back while we delete others, though hardly
// twice: programs do so once in a second.
func (s *Sweeper) endStale(f maps.Flow, so *ending) error {
	if stays, err := s.stands(leadOf(&f)); err != nil || stays {
		return err
	}
	const tries = 4
	for range tries {
		g, err := gather(s.tables, f)
		if err != nil || len(g.entries) == 0 {
			return err
		}
		if err := s.removeStale(&g, so); err != nil {
			return err
		}
	}

	return nil
}

// removeStale deletes entries of a stale flow.
func (s *Sweeper) removeStale(g *group, so *ending) error {
	counted, err := s.remove(g)
	if counted && !so.counted {
		so.counted = true
		s.maps.Loads.AddFlows(g.told.BackendId, -1)
	}
	so.ended = so.ended || len(g.entries) > 0

	return err
}

// stands says whether a lead still leads from the frontend to the backend.
func (s *Sweeper) stands(l lead) (bool, error) {
	b, ok := s.maps.BackendOf(l.backendID)
	if !ok || b.ServicePortId != l.servicePortID || b.Addr != l.backend || b.Port != l.backendPort {
		return false, nil
	}
	for _, scope := range []uint8{maps.ScopeInternal, maps.ScopeExternal} {
		if leads, err := s.leads(l, scope); err != nil || leads {
			return leads, err
		}
	}

	return false, nil
}

// leads looks up what was dialled, as programs do: by itself, or as the port of
// a node.
func (s *Sweeper) leads(l lead, scope uint8) (bool, error) {
	key := maps.FrontendKey{Addr: l.dialled, Port: l.dialledPort, Proto: protoUDP, Scope: scope}
	_, pool, ok, err := s.maps.FrontendOf(key)
	if err == nil && !ok {
		key.Addr = anyNode(l.dialled.IP())
		_, pool, ok, err = s.maps.FrontendOf(key)
	}

	return ok && pool.ServicePortId == l.servicePortID, err
}

// anyNode is the address of a node port's frontend, of the family of a.
func anyNode(a netip.Addr) maps.Addr {
	if a.Is4() {
		return maps.AddrOf(netip.IPv4Unspecified())
	}

	return maps.AddrOf(netip.IPv6Unspecified())
}
