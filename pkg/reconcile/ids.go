package reconcile

// ids hands out 32-bit ids, ascending from 1. One that was given back does not
// come again before all others have: programs may remember it for long.
type ids struct {
	next uint32
	used map[uint32]struct{}
}

func newIDs() ids {
	return ids{next: 1, used: make(map[uint32]struct{})}
}

// adopt marks an id as used. Ids that are taken later are higher than any
// that was adopted, until they wrap.
func (s *ids) adopt(id uint32) {
	s.used[id] = struct{}{}
	if id >= s.next {
		s.next = id + 1 // may wrap: take skips 0
	}
}

// take returns an id that is not used. It is never 0.
func (s *ids) take() uint32 {
	for {
		id := s.next
		s.next++
		if _, used := s.used[id]; id != 0 && !used {
			s.used[id] = struct{}{}

			return id
		}
	}
}

// free gives an id back.
func (s *ids) free(id uint32) { delete(s.used, id) }
