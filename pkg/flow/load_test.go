package flow

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// counted returns f with the flag that its backend's load includes it.
func counted(f maps.Flow, backend uint32) maps.Flow {
	f.Flags |= maps.FlowCounted
	f.BackendId = backend

	return f
}

func (w *world) mustHaveFlows(t testing.TB, backend uint32, want int) {
	t.Helper()
	if have := w.Loads.Load(backend).Flows; have != int32(want) {
		t.Errorf("backend %d has a load of %d flows, want %d", backend, have, want)
	}
}

// The load of a backend is the number of flows whose entry of the client's packets has the flag, in
// any table.
func TestLoadIsRepaired(t *testing.T) {
	w := newWorld(t, 1024)
	w.put(t, counted(flowOf(tcp, 1), 1), note{fromClient, 1, false, 0}, note{toClient, 1, false, 0})
	w.put(t, counted(flowOf(tcp, 2), 1), note{fromClient, 0, true, 0}, note{toClient, 0, true, 0})
	w.put(t, counted(masqueraded(flowOf(udp, 3)), 1), live...)
	w.put(t, flowOf(tcp, 4), note{fromClient, maps.FlowFin, false, 0}, note{toClient, maps.FlowFin, false, 0}) // counts no more
	w.put(t, counted(flowOf(tcp, 5), 2), note{toClient, 1, false, 0})                                          // unknown
	w.put(t, counted(flowOf(tcp, 6), maps.ID(3, 1)), note{fromClient, 1, false, 0})
	for id, load := range map[uint32]int32{1: 1, 2: 1, 3: -2, 4: 7, 5: -1} {
		w.Loads.AddFlows(id, load)
	}
	s := w.sweeper(t)
	status := w.mustSweep(t, s)
	for id, want := range map[uint32]int{1: 3, 2: 0, 3: 1, 4: 0, 5: 0} {
		w.mustHaveFlows(t, id, want)
	}
	if want := uint64(2 + 1 + 3 + 7 + 1); status.LoadsRepaired != want {
		t.Errorf("loads are repaired by %d flows, want %d", status.LoadsRepaired, want)
	}
	if again := w.mustSweep(t, s); again.LoadsRepaired != status.LoadsRepaired {
		t.Errorf("the next sweep repairs %d flows", again.LoadsRepaired-status.LoadsRepaired)
	}
}

// Ending a flow subtracts it from the load once, however many entries it had, and leaves nothing to repair.
func TestEndedFlowsAreNoLoad(t *testing.T) {
	const idle = 1000 * time.Hour
	old := []note{{fromClient, 1, false, idle}, {toClient, 1, false, idle}, {toBackend, 1, false, idle}, {fromBackend, 1, false, idle}}
	for _, test := range []struct {
		name  string
		notes []note
		begin int32
		flags uint8
	}{
		{"a flow", old[:2], 1, maps.FlowCounted},
		{"a flow that is masqueraded", old, 1, maps.FlowCounted},
		{"a flow on the move", []note{old[0], {fromClient, 1, true, idle}, old[1]}, 1, maps.FlowCounted},
		{"a flow whose sides have said their last", old[:2], 0, 0},
		{"a flow of which one entry is left", old[1:2], 0, maps.FlowCounted},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, 1024)
			f := masqueraded(flowOf(tcp, 1))
			f.Flags |= test.flags
			w.put(t, f, test.notes...)
			w.Loads.AddFlows(1, test.begin+5)
			for n := range 5 {
				w.put(t, counted(flowOf(tcp, 100+n), 1), live[:2]...)
			}
			status := w.mustSweep(t, w.sweeper(t))
			w.mustHaveFlows(t, 1, 5)
			if status.Expired != 1 || status.LoadsRepaired != 0 {
				t.Errorf("%d flows ended and %d repaired, want 1 and 0", status.Expired, status.LoadsRepaired)
			}
		})
	}
}

// So does ending stale flows, also if packets write entries again while they are deleted.
func TestStaleFlowsAreNoLoad(t *testing.T) {
	w := newWorld(t, 1024)
	s := w.sweeper(t)
	for n := range 3 {
		w.put(t, counted(flowOf(udp, n+1), 7), live[:2]...)
	}
	w.Loads.AddFlows(7, 3)
	again := counted(flowOf(udp, 2), 7)
	back := false
	s.hook(false, &hooked{remove: func(k maps.FlowKey) {
		if !back && k == again.Key(toClient) {
			back = true
			w.put(t, again, live[0])
		}
	}})
	w.mustEndStale(t, s, 3)
	w.mustHaveFlows(t, 7, 0)
	if !back {
		t.Error("no packet came")
	}
}

// Bytes that programs have not counted are not lost with the entry.
func TestBytesOfEndedFlows(t *testing.T) {
	w := newWorld(t, 1024)
	s := w.sweeper(t)
	put := func(f maps.Flow, bytes uint64, n note) {
		f.Bytes = bytes
		w.put(t, f, n)
	}
	const idle = 1000 * time.Hour
	f, other, stale := flowOf(tcp, 1), flowOf(tcp, 2), flowOf(udp, 3)
	other.ServicePortId, stale.ServicePortId = 2, 3
	put(f, 100, note{fromClient, 1, false, idle})
	put(f, 7000, note{toClient, 1, false, idle})
	put(other, 11, note{fromClient, 1, false, idle})
	put(flowOf(tcp, 4), 999, note{fromClient, 1, false, 0}) // lives
	if n := len(s.Bytes()); n != 0 {
		t.Errorf("%d uncounted bytes before anything ended", n)
	}
	w.mustSweep(t, s)
	put(flowOf(tcp, 5), 1, note{fromClient, 1, false, idle})
	put(stale, 40, note{toClient, 1, false, 0})
	w.mustSweep(t, s)
	w.mustEndStale(t, s, 1)
	for id, want := range map[uint32]Bytes{1: {101, 7000}, 2: {11, 0}, 3: {0, 40}} {
		if have := s.Bytes()[id]; have != want {
			t.Errorf("service port id %d: %+v, want %+v", id, have, want)
		}
	}
}

// Ids that no longer exist do not accumulate.
func TestBytesAreForgotten(t *testing.T) {
	w := newWorld(t, 1<<15)
	s := w.sweeper(t)
	lab.Must(t, w.ServicePorts.Put(5, maps.ServicePortOf("ns", "web", "", tcp, 4)))
	for n := range manyPorts + 1 {
		f := flowOf(tcp, n+1)
		f.ServicePortId, f.Bytes = uint32(n+1), 1
		w.put(t, f, note{fromClient, 1, false, 1000 * time.Hour})
	}
	w.mustSweep(t, s)
	if have := s.Bytes(); len(have) != 1 || have[5].Sent != 1 {
		t.Errorf("%d ports are left, want that of id 5", len(have))
	}
}

// traffic simulates programs while the tables are read, as far as it affects loads.
type traffic struct {
	*world
	*rand.Rand
	t     testing.TB
	flows map[int]maps.Flow // by number
	loads map[uint32]int    // of their backends
	put   int               // entries into half_open
	next  int
}

func newTraffic(t testing.TB, seed uint64) *traffic {
	t.Helper()

	return &traffic{
		world: newWorld(t, 1<<12), Rand: rand.New(rand.NewPCG(seed, 0)), t: t,
		flows: make(map[int]maps.Flow), loads: make(map[uint32]int),
	}
}

func (r *traffic) begin() {
	r.next++
	f := counted(flowOf(tcp, r.next), uint32(1+r.IntN(3)))
	f.Created = r.clock + uint64(r.next)
	r.world.put(r.t, f, note{toClient, 0, true, 0}, note{fromClient, 0, true, 0})
	r.put += 2
	r.setCount(r.t, halfOpenPut, r.put)
	r.Loads.AddFlows(f.BackendId, 1)
	r.flows[r.next] = f
	r.loads[f.BackendId]++
}

// any returns one of the current flows, or 0.
func (r *traffic) any() int {
	for try := 0; try < 20 && r.next > 0; try++ {
		if n := 1 + r.IntN(r.next); r.flows[n].Proto != 0 {
			return n
		}
	}

	return 0
}

// assure moves a flow to the table of assured flows.
func (r *traffic) assure() {
	n := r.any()
	if n == 0 {
		return
	}
	f := r.flows[n]
	r.world.put(r.t, f, note{fromClient, 1, false, 0}, note{toClient, 1, false, 0})
	lab.Must(r.t, r.HalfOpen.Delete(f.Key(fromClient)), r.HalfOpen.Delete(f.Key(toClient)))
}

// end closes a flow from both sides.
func (r *traffic) end() {
	n := r.any()
	if n == 0 {
		return
	}
	f := r.flows[n]
	_, halfOpen, err := r.HalfOpen.Lookup(f.Key(fromClient))
	lab.Must(r.t, err)
	f.Flags &^= maps.FlowCounted
	r.world.put(r.t, f, note{fromClient, maps.FlowFin, halfOpen, 0})
	r.Loads.AddFlows(f.BackendId, -1)
	r.loads[f.BackendId]--
	delete(r.flows, n)
}

// evict evicts a flow from its table, without any count.
func (r *traffic) evict() {
	n := r.any()
	if n == 0 {
		return
	}
	key := r.flows[n].Key(fromClient)
	lab.Must(r.t, r.HalfOpen.Delete(key), r.Flows.Delete(key))
	r.loads[r.flows[n].BackendId]--
	delete(r.flows, n)
}

func (r *traffic) step() {
	switch r.IntN(3) {
	case 0:
		r.begin()
	case 1:
		r.assure()
	default:
		r.end()
	}
}

// slow is a map that is read entry by entry, with traffic in between. New entries may be before or behind
// the place that is read.
type slow struct {
	entries
	*rand.Rand
	between func()
}

func (s *slow) All() iter.Seq2[maps.Entry[maps.FlowKey, maps.Flow], error] {
	return func(yield func(maps.Entry[maps.FlowKey, maps.Flow], error) bool) {
		passed := make(map[maps.FlowKey]bool)
		for more := true; more; {
			var keys []maps.FlowKey
			for e := range s.entries.All() {
				if !passed[e.Key] {
					keys = append(keys, e.Key)
				}
			}
			more = len(keys) > 0
			for _, key := range keys {
				passed[key] = true
				s.between()
				v, ok, err := s.entries.Lookup(key)
				if ok && !yield(maps.Entry[maps.FlowKey, maps.Flow]{Key: key, Value: v}, err) {
					return
				}
			}
			if s.IntN(2) == 0 {
				return // what has come since is before the place
			}
		}
	}
}

// A sweep never makes a correct load wrong, whatever programs do during it; and the first one during
// which no flow begins makes all loads correct.
func TestLoadsWhileFlowsComeAndGo(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			r := newTraffic(t, seed)
			for range 60 {
				r.step()
			}
			s := r.sweeper(t)
			busy := true
			for i := range s.tables {
				s.tables[i].entries = &slow{s.tables[i].entries, r.Rand, func() {
					if busy && r.IntN(4) == 0 {
						r.step()
					}
				}}
			}
			for range 10 {
				r.mustSweep(t, s)
				r.mustAgree("a sweep while flows came and went")
			}
			for range 5 {
				r.evict()
			}
			r.mustSweep(t, s)
			busy = false
			r.mustSweep(t, s)
			r.mustAgree("a sweep after flows were evicted")
		})
	}
}

// mustAgree compares loads with the current flows.
func (r *traffic) mustAgree(after string) {
	r.t.Helper()
	for id := uint32(1); id <= 3; id++ {
		if have := r.Loads.Load(id).Flows; have != int32(r.loads[id]) {
			r.t.Fatalf("after %s: backend %d has a load of %d flows, want %d", after, id, have, r.loads[id])
		}
	}
}

// A load that is off by more than what the scan may have missed is corrected in part at once, under
// any traffic.
func TestLargeDriftIsRepairedWhileBusy(t *testing.T) {
	r := newTraffic(t, 1)
	s := r.sweeper(t)
	s.hook(false, &hooked{all: func() { r.begin(); r.begin() }})
	for _, drift := range []int32{1000, -1000} {
		r.Loads.AddFlows(1, drift)
		r.mustSweep(t, s)
		if off := r.Loads.Load(1).Flows - int32(r.loads[1]); off < -4 || off > 4 {
			t.Errorf("the load is off by %d flows, of %d", off, drift)
		}
		r.Loads.AddFlows(1, int32(r.loads[1])-r.Loads.Load(1).Flows)
	}
}

// A flow that is confirmed after the scan has read the half-open ones is in both tables, and counts once.
func TestLoadOfAFlowThatIsConfirmed(t *testing.T) {
	w := newWorld(t, 1024)
	s := w.sweeper(t)
	w.put(t, counted(flowOf(tcp, 1), 1), note{fromClient, 0, true, 0}, note{toClient, 0, true, 0})
	w.Loads.AddFlows(1, 1)
	s.hook(false, &hooked{all: func() { w.put(t, counted(flowOf(tcp, 1), 1), live[:2]...) }})
	if status := w.mustSweep(t, s); status.LoadsRepaired != 0 {
		t.Errorf("the sweep repairs %d flows", status.LoadsRepaired)
	}
	w.mustHaveFlows(t, 1, 1)
}

// The load still includes a flow that was evicted, because nothing has subtracted it. If a packet writes
// its entries again behind the place that a scan has reached, the load is correct.
func TestLoadOfAFlowThatWasWrittenAgain(t *testing.T) {
	w := newWorld(t, 1024)
	s := w.sweeper(t)
	w.Loads.AddFlows(1, 1)
	again := func() {
		w.put(t, counted(flowOf(tcp, 1), 1), live[:2]...)
		w.setCount(t, flowsPut, 2)
		w.setCount(t, flowsRepaired, 2)
	}
	s.hook(false, &hooked{read: again})
	for sweep := range 2 {
		status := w.mustSweep(t, s)
		w.mustHaveFlows(t, 1, 1)
		if status.LoadsRepaired != 0 {
			t.Errorf("sweep %d repairs %d flows", sweep, status.LoadsRepaired)
		}
	}
}
