package flow

import "github.com/sluice-lb/sluice/maps"

// Ended counts flows by the family of what was dialled.
type Ended struct{ IPv4, IPv6 uint64 }

func (e *Ended) add(dialled maps.Addr) {
	if dialled.IP().Is4() {
		e.IPv4++
	} else {
		e.IPv6++
	}
}

// EndedStale returns how many flows EndStale has ended since New.
func (s *Sweeper) EndedStale() Ended { return s.ended }
