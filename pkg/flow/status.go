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
	Bytes    uint64 `json:"bytes"` // of the kernel's memory, in use or not
	// Evicted is how many entries were pushed out to make room for others,
	// since the agent started.
	Evicted uint64 `json:"evicted"`
}

// Percent returns how full the table is.
func (u Usage) Percent() int { return 100 * u.Entries / max(u.Capacity, 1) }

// Status is what is known of flows. Counts are since the agent started, if
// nothing else is said.
type Status struct {
	Flows    Usage `json:"flows"`    // of flows that work
	HalfOpen Usage `json:"halfOpen"` // of those that may never come to be

	// Emergency says what is wrong, while connections or UDP flows have used up their
	// share of flows. Flood does while half_open or unanswered push something out, where that
	// can only hit flows that are about to begin, or had no room in flows.
	Emergency   string `json:"emergency,omitempty"`
	Emergencies uint64 `json:"emergencies"`
	Flood       string `json:"flood,omitempty"`
	Floods      uint64 `json:"floods"`

	Expired uint64 `json:"expired"` // flows that were ended because nobody used them
	Stale   uint64 `json:"stale"`   // UDP flows whose backend or frontend went
	// LoadsRepaired is by how many flows the loads of backends were put right.
	LoadsRepaired uint64 `json:"loadsRepaired"`

	// Since the maps were made:
	Repaired          uint64 `json:"repaired"`          // entries that were pushed out, and put back
	MasqueradeRetries uint64 `json:"masqueradeRetries"` // ports that were taken
	StackPorts        uint64 `json:"stackPorts"`        // flows whose client port another flow had
}

// takeStock makes what was found the status.
func (s *Sweeper) takeStock(st stock) {
	b, a := st.before, st.after
	lostFlows := s.lost.flows.observe(tally{
		putBefore: b.FlowsPut, putAfter: a.FlowsPut,
		deletedBefore: b.FlowsDeleted, deletedAfter: a.FlowsDeleted,
		ours: s.deleted.flows, present: st.inFlows,
	})
	lostHalfOpen := s.lost.halfOpen.observe(tally{
		putBefore: b.HalfOpenPut, putAfter: a.HalfOpenPut,
		deletedBefore: b.HalfOpenDeleted, deletedAfter: a.HalfOpenDeleted,
		ours: s.deleted.halfOpen, present: st.inHalfOpen,
	})
	v := &s.status
	v.Flows = usage(st.inFlows, s.maps.Flows.Capacity(), s.lost.flows.total)
	v.HalfOpen = usage(st.inHalfOpen, s.maps.HalfOpen.Capacity(), s.lost.halfOpen.total)
	v.HalfOpen.Capacity += s.maps.Unanswered.Capacity()
	v.HalfOpen.Bytes += maps.FlowMemory(s.maps.Unanswered.Capacity())
	v.Repaired, v.MasqueradeRetries, v.StackPorts = a.Repaired, a.MasqueradeRetries, a.StackPorts

	s.alarms.flows.observe(st.usage.found.percent(s.room), lostFlows, st.at)
	fullest := max(
		100*int(st.opening[maps.FlowsConnected])/s.maps.HalfOpen.Capacity(),
		100*int(st.opening[maps.FlowsUDP])/s.maps.Unanswered.Capacity(),
	)
	s.alarms.halfOpen.observe(fullest, lostHalfOpen, st.at)
	v.Emergency, v.Flood = "", ""
	v.Emergencies, v.Floods = s.alarms.flows.times, s.alarms.halfOpen.times
	if s.alarms.flows.on {
		v.Emergency = fmt.Sprintf("the table of flows is at its limit: %s. New connections may be refused, and UDP flows cut short. Give a larger --flow-table-memory than the %d MiB of now: it counts after 'sluice cleanup', when the tables are created anew",
			v.Flows, (v.Flows.Bytes+v.HalfOpen.Bytes)>>20)
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
		text += fmt.Sprintf(", %d were pushed out", u.Evicted)
	}

	return text
}

// Look returns what can be known of flows without an agent: how full the tables
// are, and what programs count.
func Look(m *maps.Pinned) (Status, error) {
	s, err := New(Config{Maps: m})
	if err != nil {
		return Status{}, err
	}
	st, err := s.scan(s.timeouts, maps.SourceSweep{})
	if err != nil {
		return Status{}, fmt.Errorf("flows: %w", err)
	}
	s.takeStock(st)

	return s.status, nil
}

// When an alarm goes on, and when off again.
const (
	fullPercent  = 90
	roomyPercent = 80
	quietTime    = time.Minute
)

// alarm is on while a table is at its limit, by how full it is in percent.
type alarm struct {
	on    bool
	times uint64
	last  uint64 // when an eviction was noticed
}

// observe takes into account how full the table is, and how many entries have
// been evicted from it since the last call.
func (a *alarm) observe(percent int, evicted, now uint64) {
	if evicted > 0 {
		a.last = now
	}
	quiet := a.last == 0 || since(a.last, now) > quietTime
	switch {
	case !a.on && (evicted > 0 || percent >= fullPercent):
		a.on = true
		a.times++
	case a.on && quiet && percent < roomyPercent:
		a.on = false
	}
}
