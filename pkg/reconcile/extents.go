package reconcile

import "slices"

// extent is a set of backends, and the run of slots that holds them. Frontends
// of one port with equal sets share it. Once in slots it is never written
// again: another set is another extent.
type extent struct {
	ids  []uint32 // of backends, ascending
	base uint32   // zero: not in slots

	claims    int  // that want it
	frontends int  // that lead to it
	wanted    bool // by a claim that has its address
	due       instant
}

// live says whether a frontend leads to e or is about to.
func (e *extent) live() bool { return e.wanted || e.frontends > 0 }

func (e *extent) isWanted() bool { return e.wanted }

func (e *extent) any() bool { return true }

func (e *extent) holds(id uint32) bool {
	_, ok := slices.BinarySearch(e.ids, id)

	return ok
}

// extent returns the extent of p with these backends, after making it if need
// be. Without backends there is none: nil.
func (p *port) extent(ids []uint32) *extent {
	if len(ids) == 0 {
		return nil
	}
	for _, e := range p.extents {
		if slices.Equal(e.ids, ids) {
			return e
		}
	}
	e := &extent{ids: slices.Clone(ids)}
	p.extents = append(p.extents, e)

	return e
}

// leadsTo says whether an extent of p that passes the test holds id.
func (p *port) leadsTo(id uint32, test func(*extent) bool) bool {
	for _, e := range p.extents {
		if test(e) && e.holds(id) {
			return true
		}
	}

	return false
}
