package flow

import (
	"fmt"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Usage is how full a table is.
type Usage struct {
	Entries  int    `json:"entries"`
	Capacity int    `json:"capacity"`
	Bytes    uint64 `json:"bytes"` // of kernel memory, allocated in advance
	// Evicted is how many entries the kernel evicted to make room, since the agent started.
	Evicted uint64 `json:"evicted"`
}

// Percent returns how full the table is.
func (u Usage) Percent() int { return 100 * u.Entries / max(u.Capacity, 1) }

// Status is the state of the tables of flows. Counts are since the agent started, except where stated.
type Status struct {
	Flows    Usage `json:"flows"`    // of assured flows
	HalfOpen Usage `json:"halfOpen"` // of flows that are not assured

	// Emergency is a message while connections or UDP flows have used up their share of flows.
	// Flood is one while entries of half_open or unanswered are evicted, which only affects flows
	// that are being opened, or had no room in flows.
	Emergency   string `json:"emergency,omitempty"`
	Emergencies uint64 `json:"emergencies"`
	Flood       string `json:"flood,omitempty"`
	Floods      uint64 `json:"floods"`

	Expired uint64 `json:"expired"` // idle flows that were ended
	Stale   uint64 `json:"stale"`   // UDP flows ended because their backend or frontend was removed
	// LoadsRepaired is the number of flows by which the loads of backends were corrected.
	LoadsRepaired uint64 `json:"loadsRepaired"`

	// Since the maps were made:
	Repaired          uint64 `json:"repaired"`          // evicted entries that were written again
	MasqueradeRetries uint64 `json:"masqueradeRetries"` // ports that another flow had
	StackPorts        uint64 `json:"stackPorts"`        // flows whose client port another flow had
}

// setCounts sets what was counted since the maps were made. A status has it from the first moment on:
// a count that begins at zero and then has all of it would show growth that there was not.
func (v *Status) setCounts(c maps.FlowCounts) {
	v.Repaired, v.MasqueradeRetries, v.StackPorts = c.Repaired, c.MasqueradeRetries, c.StackPorts
}

// updateStatus updates the status from a scan.
func (s *Sweeper) updateStatus(st scanned) {
	b, a := st.before, st.after
	lostFlows := s.lost.flows.observe(tableCounts{
		putBefore: b.FlowsPut, putAfter: a.FlowsPut,
		deletedBefore: b.FlowsDeleted, deletedAfter: a.FlowsDeleted,
		ours: s.deleted.flows, present: st.inFlows,
	})
	lostHalfOpen := s.lost.halfOpen.observe(tableCounts{
		putBefore: b.HalfOpenPut, putAfter: a.HalfOpenPut,
		deletedBefore: b.HalfOpenDeleted, deletedAfter: a.HalfOpenDeleted,
		ours: s.deleted.halfOpen, present: st.inHalfOpen,
	})
	v := &s.status
	v.Flows = usage(st.inFlows, s.maps.Flows.Capacity(), s.lost.flows.total)
	v.HalfOpen = usage(st.inHalfOpen, s.maps.HalfOpen.Capacity(), s.lost.halfOpen.total)
	v.HalfOpen.Capacity += s.maps.Unanswered.Capacity()
	v.HalfOpen.Bytes += maps.FlowMemory(s.maps.Unanswered.Capacity())
	v.setCounts(a)

	s.alarms.flows.observe(st.usage.found.percent(s.room), lostFlows, st.at)
	fullest := max(
		100*int(st.opening[maps.FlowsConnected])/s.maps.HalfOpen.Capacity(),
		100*int(st.opening[maps.FlowsUDP])/s.maps.Unanswered.Capacity(),
	)
	s.alarms.halfOpen.observe(fullest, lostHalfOpen, st.at)
	v.Emergency, v.Flood = "", ""
	v.Emergencies, v.Floods = s.alarms.flows.times, s.alarms.halfOpen.times
	if s.alarms.flows.on {
		v.Emergency = fmt.Sprintf("the table of flows is at its limit: %s. New connections may be refused, and UDP flows cut short. Give a larger --flow-table-memory than the %.1f MiB of now: it counts after 'sluice cleanup', when the tables are created anew",
			v.Flows, float64(v.Flows.Bytes+v.HalfOpen.Bytes)/(1<<20))
	}
	if s.alarms.halfOpen.on {
		v.Flood = fmt.Sprintf("more flows are begun than can be remembered until they are answered: %s. It may be a flood of forged packets. Connections that work are safe, new ones may fail",
			v.HalfOpen)
	}
}

func usage(entries, capacity int, evicted uint64) Usage {
	return Usage{Entries: entries, Capacity: capacity, Bytes: maps.FlowMemory(capacity), Evicted: evicted}
}

func (u Usage) String() string {
	text := fmt.Sprintf("%d of %d entries (%d %%)", u.Entries, u.Capacity, u.Percent())
	if u.Evicted > 0 {
		text += fmt.Sprintf(", %d were evicted", u.Evicted)
	}

	return text
}

// ReadStatus returns the part of the status that is known without an agent: how full the tables are, and
// what programs count.
func ReadStatus(m *maps.Pinned) (Status, error) {
	s, err := New(Config{Maps: m})
	if err != nil {
		return Status{}, err
	}
	st, err := s.scan(s.timeouts, maps.SourceSweep{})
	if err != nil {
		return Status{}, fmt.Errorf("flows: %w", err)
	}
	s.updateStatus(st)

	return s.status, nil
}

// The limits at which an alarm starts, and ends again.
const (
	fullPercent  = 90
	clearPercent = 80
	quietPeriod  = time.Minute
)

// alarm is on while a table is at its limit, in percent of its capacity.
type alarm struct {
	on    bool
	times uint64
	last  uint64 // when an eviction was noticed
}

// observe updates the alarm from the fill of the table, and the number of entries evicted from it
// since the last call.
func (a *alarm) observe(percent int, evicted, now uint64) {
	if evicted > 0 {
		a.last = now
	}
	quiet := a.last == 0 || since(a.last, now) > quietPeriod
	switch {
	case !a.on && (evicted > 0 || percent >= fullPercent):
		a.on = true
		a.times++
	case a.on && quiet && percent < clearPercent:
		a.on = false
	}
}

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
