package reconcile

import (
	"iter"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/pkg/maglev"
)

// extent is a set of backends, and the run of slots that holds them: first each
// once, and behind them, for algorithms that hash, the table that has each many
// times. Frontends of one port with equal sets share it, if they agree about the
// table. Once in slots it is never written again: another set is another extent.
type extent struct {
	ids   []uint32 // of backends, ascending
	table []uint32 // of the same backends; nil: none
	base  uint32   // zero: not in slots
	// foreign: the table was found in slots, and not compared with what this
	// agent would write.
	foreign bool

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

// length returns how many slots e takes.
func (e *extent) length() int { return len(e.ids) + len(e.table) }

// slots yields every slot of e, which is in slots, with the backend in it.
func (e *extent) slots() iter.Seq2[uint32, uint32] {
	return func(yield func(slot, id uint32) bool) {
		slot := e.base
		for _, run := range [][]uint32{e.ids, e.table} {
			for _, id := range run {
				if !yield(slot, id) {
					return
				}
				slot++
			}
		}
	}
}

// extent returns the extent of p with these backends, and with a table if
// tabled, after making it if need be. Without backends there is none: nil.
func (p *port) extent(ids []uint32, tabled bool) *extent {
	if len(ids) == 0 {
		return nil
	}
	for _, e := range p.extents {
		if tabled == (e.table != nil) && slices.Equal(e.ids, ids) && p.knows(e) {
			return e
		}
	}
	e := &extent{ids: slices.Clone(ids)}
	if tabled {
		e.table = p.table(ids)
	}
	p.extents = append(p.extents, e)

	return e
}

// knows says whether e is as this agent would write it. An earlier one may have
// had other tables.
func (p *port) knows(e *extent) bool {
	e.foreign = e.foreign && !slices.Equal(e.table, p.table(e.ids))

	return !e.foreign
}

// table returns the table of backends of p, whose ids are ascending.
func (p *port) table(ids []uint32) []uint32 {
	addrs := make([]netip.AddrPort, len(ids))
	for i := range p.backends {
		if at, ok := slices.BinarySearch(ids, p.backends[i].id); ok {
			addrs[at] = p.backends[i].addrPort()
		}
	}
	table := make([]uint32, 0, maglev.Size(len(ids)))
	for _, i := range maglev.Table(addrs) {
		table = append(table, ids[i])
	}

	return table
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
