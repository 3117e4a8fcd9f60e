package flow

// evictions counts what a table pushed out to make room: the kernel does not
// tell. What was put, and is neither there nor was deleted, has been. Tables are
// in use while they are read, so the counters are read before and after, and
// what may be no eviction is none.
type evictions struct {
	begun bool
	base  int64 // what is missing because of earlier agents: they deleted, too
	total uint64
}

// tally is what was counted of one table: puts and deletes of programs before
// and after it was read, deletes of ours before, and what was found.
type tally struct {
	putBefore, putAfter         uint64
	deletedBefore, deletedAfter uint64
	ours                        uint64
	present                     int
}

// observe takes a tally into account, and returns how many evictions are new.
// The first one is where counting begins. Counters of programs begin anew with
// the maps, and so does a Sweeper.
func (e *evictions) observe(t tally) uint64 {
	known := int64(t.ours) + int64(t.present)
	if !e.begun {
		e.begun = true
		e.base = int64(t.putAfter) - int64(t.deletedBefore) - known // at most

		return 0
	}
	missing := int64(t.putBefore) - int64(t.deletedAfter) - known - e.base // at least
	if missing <= int64(e.total) {
		return 0
	}
	fresh := uint64(missing) - e.total
	e.total += fresh

	return fresh
}
