package flow

import (
	"fmt"
	"iter"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// world is the maps of a node, and a clock. Only the test uses them.
type world struct {
	*maps.Pinned
	writer *mapstest.Writer
	clock  uint64
}

// epoch is the time at which worlds begin: later than any timeout.
const epoch = uint64(1000 * time.Hour)

func newWorld(t testing.TB, capacity uint32) *world {
	t.Helper()
	pinned := mapstest.MustCreate(t, map[string]uint32{maps.NameFlows: capacity, maps.NameHalfOpen: capacity, maps.NameUnanswered: capacity})

	return &world{Pinned: pinned, writer: mapstest.New(pinned.Tables), clock: epoch}
}

func (w *world) sweeper(t testing.TB) *Sweeper {
	t.Helper()
	s, err := New(Config{Maps: w.Pinned, Now: func() uint64 { return w.clock }})
	lab.Must(t, err)

	return s
}

func (w *world) mustSweep(t testing.TB, s *Sweeper) Status {
	t.Helper()
	status, err := s.Sweep()
	lab.Must(t, err)

	return status
}

// flowOf returns the nth of many flows; n may be up to 65535.
func flowOf(proto uint8, n int) maps.Flow {
	return maps.Flow{
		Client: addr("198.51.100.7"), ClientPort: maps.Port(uint16(n)), StackPort: maps.Port(uint16(n)),
		OriginalDst: addr("10.96.0.1"), OriginalPort: maps.Port(80),
		Backend: addr("10.244.2.2"), BackendPort: maps.Port(8080),
		Proto: proto, ServicePortId: 1, BackendId: 1,
		Created: epoch - uint64(100*time.Hour),
	}
}

func masqueraded(f maps.Flow) maps.Flow {
	f.Masquerade, f.MasqueradePort = addr("192.168.50.1"), f.ClientPort
	f.Flags |= maps.FlowMasqueraded

	return f
}

func addr(a string) maps.Addr { return maps.AddrOf(netip.MustParseAddr(a)) }

// note is the part of an entry that differs between the entries of a flow.
type note struct {
	role     uint8
	state    uint8
	halfOpen bool
	idle     time.Duration
}

// put writes one entry for each note.
func (w *world) put(t testing.TB, f maps.Flow, notes ...note) {
	t.Helper()
	for _, n := range notes {
		f.Role, f.State, f.LastSeen = n.role, n.state, w.clock-uint64(n.idle)
		in := w.Flows
		if n.halfOpen {
			in = w.Opening(f.Proto)
		}
		lab.Must(t, in.Put(f.Key(n.role), f))
	}
}

// count returns how many entries of f there are, as its keys have it.
func (w *world) count(t testing.TB, f maps.Flow) int {
	t.Helper()
	n := 0
	for _, role := range f.Roles() {
		for _, in := range tablesOf(w.Pinned) {
			v, ok, err := in.Lookup(f.Key(role))
			lab.Must(t, err)
			if ok && v.BackendId == f.BackendId {
				n++
			}
		}
	}

	return n
}

// The indices of flow_counts.
const (
	flowsPut = iota
	flowsDeleted
	halfOpenPut
	halfOpenDeleted
	flowsRepaired
	masqueradeRetries
	stackPorts
)

// setCount sets a counter of programs.
func (w *world) setCount(t testing.TB, index uint32, n int) {
	t.Helper()
	perCPU := make([]uint64, ebpf.MustPossibleCPU())
	perCPU[len(perCPU)-1] = uint64(n)
	lab.Must(t, w.Replacements()["sl_flow_counts"].Put(index, perCPU))
}

// hooked is a map of flows with calls in between.
type hooked struct {
	entries
	all    func()             // before a pass
	read   func()             // after one
	looked func(maps.FlowKey) // after a lookup
	remove func(maps.FlowKey) // before a delete
}

func (h *hooked) All() iter.Seq2[maps.Entry[maps.FlowKey, maps.Flow], error] {
	if h.all != nil {
		h.all()
	}

	return func(yield func(maps.Entry[maps.FlowKey, maps.Flow], error) bool) {
		for e, err := range h.entries.All() {
			if !yield(e, err) {
				return
			}
		}
		if h.read != nil {
			h.read()
		}
	}
}

func (h *hooked) Lookup(k maps.FlowKey) (maps.Flow, bool, error) {
	v, ok, err := h.entries.Lookup(k)
	if h.looked != nil {
		h.looked(k)
	}

	return v, ok, err
}

func (h *hooked) Remove(k maps.FlowKey) (bool, error) {
	if h.remove != nil {
		h.remove(k)
	}

	return h.entries.Remove(k)
}

// hook wraps the map of flows, or of half-open connections.
func (s *Sweeper) hook(halfOpen bool, h *hooked) {
	for i := range s.tables {
		if s.tables[i].halfOpen == halfOpen {
			h.entries = s.tables[i].entries
			s.tables[i].entries = h

			return
		}
	}
}

func (n note) String() string {
	return fmt.Sprintf("role %d state %d half open %v idle %v", n.role, n.state, n.halfOpen, n.idle)
}
