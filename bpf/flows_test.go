package bpf

import (
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// entry is an entry of a flow, in either table.
type entry struct {
	key      maps.FlowKey
	flow     maps.Flow
	halfOpen bool
}

// entries returns all entries.
func (w *world) entries(t testing.TB) []entry {
	t.Helper()
	var all []entry
	for e, err := range w.maps.Flows.All() {
		lab.Must(t, err)
		all = append(all, entry{key: e.Key, flow: e.Value})
	}
	for _, opening := range []*maps.Map[maps.FlowKey, maps.Flow]{w.maps.HalfOpen, w.maps.Unanswered} {
		for e, err := range opening.All() {
			lab.Must(t, err)
			all = append(all, entry{key: e.Key, flow: e.Value, halfOpen: true})
		}
	}

	return all
}

// role returns the only entry with a role.
func (w *world) role(t testing.TB, role uint8) entry {
	t.Helper()
	var found []entry
	for _, e := range w.entries(t) {
		if e.flow.Role == role {
			found = append(found, e)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d entries have role %d, want one: %+v", len(found), role, found)
	}

	return found[0]
}

// flowOf returns the entry of a client's packets to a VIP.
func (w *world) flowOf(t testing.TB, client, vip string) maps.Flow {
	t.Helper()
	for _, proto := range transports {
		for _, hook := range []uint8{maps.HookIngress, maps.HookEgress} {
			key := maps.FlowKeyOf(hook, uint8(proto), w.family.addrPort(at(client)), w.family.addrPort(at(vip)))
			for _, table := range []*maps.Map[maps.FlowKey, maps.Flow]{w.maps.Flows, w.maps.Opening(key.Proto)} {
				f, ok, err := table.Lookup(key)
				lab.Must(t, err)
				if ok && f.Role == maps.FlowFromClient {
					return f
				}
			}
		}
	}
	t.Fatalf("there is no flow from %s to %s", client, vip)

	return maps.Flow{}
}

// backendOf returns the one of these backends that a flow has.
func (w *world) backendOf(t testing.TB, f maps.Flow, of ...string) string {
	t.Helper()
	i := slices.IndexFunc(of, func(backend string) bool { return w.family.addrPort(at(backend)) == f.BackendAddrPort() })
	if i < 0 {
		t.Fatalf("the backend is %s, want one of %v", f.BackendAddrPort(), of)
	}

	return of[i]
}

// holds checks the number of entries, that all are in one table, and that each is under its key.
func (w *world) holds(t testing.TB, n int, halfOpen bool) {
	t.Helper()
	all := w.entries(t)
	if len(all) != n {
		t.Errorf("%d entries, want %d: %+v", len(all), n, all)
	}
	for _, e := range all {
		if e.halfOpen != halfOpen {
			t.Errorf("entry of role %d: half open is %v, want %v", e.flow.Role, e.halfOpen, halfOpen)
		}
		if e.key != e.flow.Key(e.flow.Role) {
			t.Errorf("entry of role %d has the key %+v, want %+v", e.flow.Role, e.key, e.flow.Key(e.flow.Role))
		}
	}
}

// states checks the states of entries, by role.
func (w *world) states(t testing.TB, want map[uint8]uint8) {
	t.Helper()
	for role, state := range want {
		if e := w.role(t, role); e.flow.State != state {
			t.Errorf("entry of role %d is in state %d, want %d", role, e.flow.State, state)
		}
	}
}

// put replaces an entry.
func (w *world) put(t testing.TB, e entry) {
	t.Helper()
	if e.halfOpen {
		lab.Must(t, w.maps.Opening(e.key.Proto).Put(e.key, e.flow))
	} else {
		lab.Must(t, w.maps.Flows.Put(e.key, e.flow))
	}
}

// checkedShift is CHECKED_SHIFT.
const checkedShift = 27

// wait makes all entries older, as if time had passed without a packet.
func (w *world) wait(t testing.TB, d time.Duration) {
	t.Helper()
	fragments := w.maps.Replacements()["sl_fragments"]
	var key [40]byte
	var value struct {
		Ports   [2]uint16
		Missing int32
		Since   uint64
	}
	older := make(map[[40]byte]any)
	each := fragments.Iterate()
	for each.Next(&key, &value) {
		value.Since -= uint64(d)
		older[key] = value
	}
	lab.Must(t, each.Err())
	for key, value := range older {
		lab.Must(t, fragments.Put(key, value))
	}
	for _, e := range w.entries(t) {
		e.flow.LastSeen -= uint64(d)
		e.flow.Created -= uint64(d)
		if e.key.Proto == uint8(layers.IPProtocolUDP) && e.flow.Role == maps.FlowFromClient {
			e.flow.Ack -= uint32(d >> checkedShift)
		}
		w.put(t, e)
	}
}

// delete removes an entry, like an eviction.
func (w *world) delete(t testing.TB, e entry) {
	t.Helper()
	if e.halfOpen {
		lab.Must(t, w.maps.Opening(e.key.Proto).Delete(e.key))
	} else {
		lab.Must(t, w.maps.Flows.Delete(e.key))
	}
}

// counted returns the counts of flows while f ran.
func (w *world) counted(t testing.TB, f func()) maps.FlowCounts {
	t.Helper()
	before, err := w.maps.FlowCounts()
	lab.Must(t, err)
	f()
	after, err := w.maps.FlowCounts()
	lab.Must(t, err)
	after.FlowsPut -= before.FlowsPut
	after.FlowsDeleted -= before.FlowsDeleted
	after.HalfOpenPut -= before.HalfOpenPut
	after.HalfOpenDeleted -= before.HalfOpenDeleted
	after.Repaired -= before.Repaired
	after.MasqueradeRetries -= before.MasqueradeRetries
	after.StackPorts -= before.StackPorts

	return after
}
