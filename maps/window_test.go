package maps

import (
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// manySlots take several windows, of which the last is not a whole one.
const manySlots = 3*windowSize/slotStride + 1000

// An array is in memory where it was used, and nowhere else, whoever used it.
func TestWindows(t *testing.T) {
	opts := small()
	opts.Capacities[NameSlots] = manySlots
	p := mustCreate(t, mustRoot(t), opts)
	const edge = windowSize / slotStride
	if n := len(p.slots.mapped); n != 0 {
		t.Fatalf("%d windows before anything was used", n)
	}
	var writers sync.WaitGroup
	for _, i := range []uint32{1, edge - 1, edge, manySlots - 1} {
		for range 2 {
			writers.Go(func() {
				if err := p.Slots.Set(i, i); err != nil {
					t.Error(err)
				}
			})
		}
	}
	writers.Wait()
	for _, i := range []uint32{1, edge - 1, edge, manySlots - 1} {
		var looked uint32
		if err := p.byName[NameSlots].Lookup(i, &looked); err != nil || looked != i {
			t.Errorf("slot %d: %d in the map, %v", i, looked, err)
		}
	}
	if n := len(p.slots.mapped); n != 3 {
		t.Errorf("%d windows after three were used", n)
	}
}

// What programs count is found in every part of the array.
func TestMappedLoads(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	want := []Entry[uint32, BackendLoad]{
		{0, BackendLoad{Flows: 3}}, {7, BackendLoad{Flows: -1}},
		{windowSize/8 + 1, BackendLoad{Sockets: 2}}, {LoadCells - 1, BackendLoad{Sockets: 1, Flows: 1}},
	}
	for _, e := range want {
		if err := p.byName[NameBackendLoad].Put(e.Key, &e.Value); err != nil {
			t.Fatal(err)
		}
	}
	var have []Entry[uint32, BackendLoad]
	for e, err := range p.BackendLoad.All() {
		if err != nil {
			t.Fatal(err)
		}
		have = append(have, e)
	}
	if diff := cmp.Diff(want, have, cmp.Comparer(func(a, b BackendLoad) bool { return a == b })); diff != "" {
		t.Errorf("all loads: -want +have\n%s", diff)
	}
	if n := len(p.BackendLoad.mapped); n != 0 {
		t.Errorf("%d windows stay after reading all", n)
	}
	for range p.BackendLoad.All() {
		break
	}
	p.BackendLoad.AddFlows(LoadCells+7, 5) // of the same cell as 7
	if load := p.BackendLoad.Load(7); load != (BackendLoad{Flows: 4}) {
		t.Errorf("load of 7: %+v", load)
	}
}
