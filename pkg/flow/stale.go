package flow

import (
	"fmt"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// lateAnswers is how long a backend that is gone may still answer earlier requests.
const lateAnswers = 50 * time.Millisecond

// maxTries is how often a stale flow is deleted while packets write its entries again. They hardly
// do so twice: programs write them once a second.
const maxTries = 4

// EndStale ends the UDP flows whose backend is gone, or whose original destination no longer leads
// to their service port, and no others: if their clients send again, they get a current backend.
// Earlier requests can still be answered, because the entries of the replies are deleted 50 ms
// later. It returns the flows that it ended, also next to an error.
//
// TCP and SCTP connections are left alone, as kube-proxy leaves them; so are flows to a backend
// that gets no new flows but still exists. A flow does not include the scope of its frontend: it
// stays if either scope leads to its service port.
func (s *Sweeper) EndStale() (Ended, error) {
	var ended Ended
	for {
		stale, err := s.findStale()
		if err != nil {
			return ended, fmt.Errorf("stale flows: %w", err)
		}
		for f, e := range stale {
			if err := s.removeStale(f, e, 1, maps.FlowFromClient); err != nil {
				return ended, fmt.Errorf("stale flow: %w", err)
			}
		}
		if len(stale) > 0 {
			time.Sleep(lateAnswers)
		}
		n := 0
		for f, e := range stale {
			if err := s.removeStale(f, e, maxTries, roles[:]...); err != nil {
				return ended, fmt.Errorf("stale flow: %w", err)
			}
			if e.ended {
				n++
				ended.add(f.OriginalDst)
			}
		}
		s.status.Stale += uint64(n)
		if n == 0 || len(stale) < maxBatch {
			return ended, nil
		}
	}
}

// staleFlow is what was done about a stale flow.
type staleFlow struct {
	ended   bool // some entry was deleted
	counted bool // it was subtracted from its backend's load: only once, even if packets write entries again
}

// findStale returns the identities of flows that seem to be stale.
func (s *Sweeper) findStale() (map[maps.Flow]*staleFlow, error) {
	stale := make(map[maps.Flow]*staleFlow)
	type staleKey struct {
		of        maps.Translation
		resteered uint8
	}
	known := make(map[staleKey]bool)
	for _, t := range s.tables {
		for e, err := range t.All() {
			if err != nil {
				return nil, err
			}
			if e.Value.Proto != protoUDP {
				continue
			}
			of := staleKey{translationOf(&e.Value), e.Value.Flags & maps.FlowResteered}
			stays, ok := known[of]
			if !ok {
				if stays, err = s.isCurrent(&e.Value); err != nil {
					return nil, err
				}
				known[of] = stays
			}
			if !stays && len(stale) < maxBatch {
				stale[identity(e.Value)] = new(staleFlow)
			}
		}
	}

	return stale, nil
}

// removeStale deletes the entries with some roles of a flow, unless the flow is no longer stale. A
// packet may write entries again meanwhile: it tries so many times.
func (s *Sweeper) removeStale(f maps.Flow, so *staleFlow, tries int, roles ...uint8) error {
	if current, err := s.isCurrent(&f); err != nil || current {
		return err
	}
	for range tries {
		g, err := gather(s.tables, f)
		if err != nil {
			return err
		}
		g.entries = slices.DeleteFunc(g.entries, func(e entry) bool { return !slices.Contains(roles, e.value.Role) })
		if len(g.entries) == 0 {
			return nil
		}
		so.ended = true
		counted, err := s.remove(&g)
		if counted && !so.counted {
			so.counted = true
			s.maps.Loads.AddFlows(g.flow.BackendId, -1)
		}
		if err != nil {
			return err
		}
	}

	return nil
}

// isCurrent reports whether the frontend of a flow still leads to its backend. That of a socket which had another
// backend first is known to the socket only.
func (s *Sweeper) isCurrent(f *maps.Flow) (bool, error) {
	of := translationOf(f)
	if f.Flags&maps.FlowResteered != 0 {
		return s.maps.HasBackend(of), nil
	}

	return s.maps.IsCurrent(of, protoUDP, maps.ScopeInternal, maps.ScopeExternal)
}

// translationOf returns how the packets of a flow are translated.
func translationOf(f *maps.Flow) maps.Translation {
	return maps.Translation{
		OriginalDst: f.OriginalDst, OriginalPort: f.OriginalPort, ServicePortID: f.ServicePortId,
		Backend: f.Backend, BackendPort: f.BackendPort, BackendID: f.BackendId,
	}
}

// Ended counts flows by the family of their original destination.
type Ended struct{ IPv4, IPv6 uint64 }

func (e *Ended) add(originalDst maps.Addr) {
	if originalDst.IP().Is4() {
		e.IPv4++
	} else {
		e.IPv6++
	}
}
