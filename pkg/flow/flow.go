// Package flow lists and ends the flows that device programs create: idle ones
// after a time that their state decides, and those of UDP when their backend or
// frontend is gone. It also tells how full the tables are, and what fell out.
//
// A flow is two or four entries of the maps flows, half_open and unanswered, and each of
// them tells all of it (types.h draws the roles). One that is masqueraded may go from
// two to four, so all four are looked for. They are used by different
// packets, so none of them alone says whether the flow is idle, or what it has
// come to. A [Sweeper] therefore decides about whole flows, from what it reads
// of all their entries right before it deletes them: all or none.
//
// Programs do not wait for us. A packet may meet a flow between the last read
// and the deletes, some microseconds, after having been away for minutes or
// hours; for UDP it makes a flow anew, which may have another backend, for TCP
// it passes untranslated.
package flow

import (
	"iter"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// Now returns the time that flows are stamped with: bpf_ktime_get_ns, which is
// CLOCK_MONOTONIC. It stands still while the machine is suspended.
func Now() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // it cannot fail: the clock exists

	return uint64(now.Nano())
}

// since returns how much later now is than then. Programs may have stamped
// something after we looked at the clock.
func since(then, now uint64) time.Duration {
	if now < then {
		return 0
	}

	return time.Duration(now - then)
}

// entries are a map of flows. [maps.Map] is the kernel's; between two calls of a
// test's, packets come.
type entries interface {
	All() iter.Seq2[maps.Entry[maps.FlowKey, maps.Flow], error]
	Lookup(maps.FlowKey) (maps.Flow, bool, error)
	Remove(maps.FlowKey) (bool, error)
}

// table is one of the maps that flows live in.
type table struct {
	entries
	halfOpen bool
}

// tablesOf returns all tables in the order in which they are to be read: flows
// only ever move to the last one, and are put there before they
// are deleted where they were. So none is missed.
func tablesOf(m *maps.Pinned) []table {
	return []table{{m.HalfOpen, true}, {m.Unanswered, true}, {m.Flows, false}}
}

// entry is one entry of a flow.
type entry struct {
	table table
	key   maps.FlowKey
	value maps.Flow
}

// group is one flow: its entries, as they were right now.
type group struct {
	entries []entry
	told    maps.Flow // by the entry that knows most
}

var roles = [...]uint8{maps.FlowFromClient, maps.FlowToClient, maps.FlowToBackend, maps.FlowFromBackend}

// gather reads all entries of the flow that one of them tells. There may be
// none any more.
func gather(tables []table, told maps.Flow) (group, error) {
	g := group{entries: make([]entry, 0, len(roles)), told: told}
	for _, role := range roles {
		masquerade := role == maps.FlowToBackend || role == maps.FlowFromBackend
		if masquerade && !g.told.IsMasqueraded() {
			continue
		}
		key := g.told.Key(role)
		for _, t := range tables {
			v, ok, err := t.Lookup(key)
			if err != nil {
				return g, err
			}
			if ok && isSame(v, g.told) {
				g.add(entry{t, key, v})
			}
		}
	}

	return g, nil
}

func (g *group) add(e entry) {
	g.entries = append(g.entries, e)
	if e.value.IsMasqueraded() {
		g.told = e.value
	}
}

// isSame says whether two entries are of one flow. One that was put before the
// flow was given its masquerade does not know of it.
func isSame(a, b maps.Flow) bool {
	if !a.IsMasqueraded() || !b.IsMasqueraded() {
		b.Masquerade, b.MasqueradePort, b.Flags = a.Masquerade, a.MasqueradePort, a.Flags
	}

	return identity(a) == identity(b)
}

// identity is what the entries of a flow have in common, and enough to find
// them.
func identity(f maps.Flow) maps.Flow {
	f.Flags &= maps.FlowMasqueraded
	f.Role, f.State, f.Ending, f.Stamp, f.Created, f.LastSeen, f.Bytes, f.End, f.Ack = 0, 0, 0, 0, 0, 0, 0, 0, 0

	return f
}

// lastSeen returns when a packet of any entry was seen, give or take
// [refresh].
func (g *group) lastSeen() uint64 {
	var last uint64
	for _, e := range g.entries {
		last = max(last, e.value.LastSeen)
	}

	return last
}

// created returns when the flow began: a client may use a port anew before what
// is left of its earlier flow is gone.
func (g *group) created() uint64 {
	var created uint64
	for _, e := range g.entries {
		created = max(created, e.value.Created)
	}

	return created
}

// isTurned reports whether no packet of the flow passes the node's network stack.
func (g *group) isTurned() bool {
	return !slices.ContainsFunc(g.entries, func(e entry) bool { return !e.value.IsTurned() })
}

// remove deletes the entries, and tells deleted of those that were still there.
func (g *group) remove(deleted func(entry)) error {
	for _, e := range g.entries {
		was, err := e.table.Remove(e.key)
		if err != nil {
			return err
		}
		if was {
			deleted(e)
		}
	}

	return nil
}
