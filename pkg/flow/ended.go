package flow

import "github.com/sluice-lb/sluice/maps"

// Ended counts flows by the family of their original destination.
type Ended struct{ IPv4, IPv6 uint64 }

func (e *Ended) add(originalDst maps.Addr) {
	if originalDst.IP().Is4() {
		e.IPv4++
	} else {
		e.IPv6++
	}
}

// EndedStale returns how many flows EndStale has ended since New.
func (s *Sweeper) EndedStale() Ended { return s.ended }
