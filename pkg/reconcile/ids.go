package reconcile

import "github.com/sluice-lb/sluice/maps"

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
	return s.takeUnless(func(uint32) bool { return false })
}

// maxPassed bounds how many ids takeUnless looks at. That so many in a row are to
// be avoided takes as many connections of removed backends.
const maxPassed = 1 << 16

// takeUnless is take that passes over the ids that avoid names, as long as there
// are not too many of them in a row.
func (s *ids) takeUnless(avoid func(uint32) bool) uint32 {
	passed := 0
	for {
		id := s.next
		s.next++
		if _, used := s.used[id]; id == 0 || used {
			continue
		}
		if passed < maxPassed && avoid(id) {
			passed++

			continue
		}
		s.used[id] = struct{}{}

		return id
	}
}

// free gives an id back.
func (s *ids) free(id uint32) { delete(s.used, id) }

// backendIDs are the ids of backends. None is given to a backend whose load
// another one still makes: one of the same cell, or connections that have outlived
// an earlier backend of that cell.
type backendIDs struct {
	ids
	loads maps.Loads
	cells []uint16 // how many used ids have each cell
	// passed counts the ids passed over since one was found or given back. Once it
	// is that of all cells, none is free, and take does not look for one.
	passed uint32
}

func newBackendIDs(loads maps.Loads) backendIDs {
	return backendIDs{ids: newIDs(), loads: loads, cells: make([]uint16, maps.LoadCells)}
}

func (s *backendIDs) adopt(id uint32) {
	s.ids.adopt(id)
	s.cells[id%maps.LoadCells]++
}

func (s *backendIDs) take() uint32 {
	id := s.takeUnless(func(id uint32) bool {
		if s.passed >= maps.LoadCells {
			return false
		}
		free := s.cells[id%maps.LoadCells] == 0 && s.loads.Load(id) == maps.BackendLoad{}
		if free {
			s.passed = 0
		} else {
			s.passed++
		}

		return !free
	})
	s.cells[id%maps.LoadCells]++

	return id
}

func (s *backendIDs) free(id uint32) {
	s.ids.free(id)
	s.cells[id%maps.LoadCells]--
	s.passed = 0
}
