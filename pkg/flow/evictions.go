package flow

// evictions counts what the kernel evicted from a table, which it does not report: entries that were
// written, and neither exist nor were deleted. Tables are in use while they are read, so counters are
// read before and after, and what may have another reason is not counted.
type evictions struct {
	begun bool
	base  int64 // missing because of deletions by earlier agents
	total uint64
}

// tableCounts are counts of one table: writes and deletes of programs before and after it was read,
// earlier deletes of the agent, and the entries found.
type tableCounts struct {
	putBefore, putAfter         uint64
	deletedBefore, deletedAfter uint64
	ours                        uint64
	present                     int
}

// observe adds counts, and returns the number of new evictions. The first call is the baseline. Counters
// of programs start with the maps, and a Sweeper may start later.
func (e *evictions) observe(t tableCounts) uint64 {
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
