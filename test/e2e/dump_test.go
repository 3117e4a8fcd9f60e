package e2e

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/sluice"
)

// dump is what the maps hold, with its ids and slots.
type dump struct {
	Frontends map[maps.FrontendKey]frontend
	Backends  map[uint32]maps.Backend // by id
	Ports     map[uint32]maps.ServicePort
}

// frontend is what a client reaches.
type frontend struct {
	ID       uint32
	Frontend maps.Frontend
	Pool     maps.Pool
	Slots    []uint32 // of the pool's backends
}

func mustDump(t testing.TB, pinned *maps.Pinned) dump {
	t.Helper()

	d := dump{
		Frontends: make(map[maps.FrontendKey]frontend),
		Backends:  mustReadBackends(t, pinned),
		Ports:     sluice.MustRead(t, pinned.ServicePorts),
	}
	for key, id := range sluice.MustRead(t, pinned.FrontendIDs) {
		f := frontend{ID: id, Frontend: pinned.Frontends.Get(id)}
		f.Pool = pinned.Pools.Get(f.Frontend.PoolId)
		for i := range f.Pool.SlotCount {
			f.Slots = append(f.Slots, pinned.Slots.Get(f.Pool.SlotBase+i))
		}
		d.Frontends[key] = f
	}

	return d
}

// mustReadBackends returns the backends by their ids, of the chunks that there were when the
// maps were opened.
func mustReadBackends(t testing.TB, pinned *maps.Pinned) map[uint32]maps.Backend {
	t.Helper()
	backends := make(map[uint32]maps.Backend)
	for _, b := range pinned.Backends.All() {
		if b.Id != 0 {
			backends[b.Id] = b
		}
	}

	return backends
}

// mustEqual fails the test if an agent changed what it should have kept.
func mustEqual(t testing.TB, after, before dump) {
	t.Helper()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the maps are not as before (-before +after):\n%s", diff)
	}
}

// mustLeadSomewhere fails the test if a frontend leads to a backend that does
// not exist, or that is another frontend's.
func mustLeadSomewhere(t testing.TB, pinned *maps.Pinned) []status.Frontend {
	t.Helper()
	frontends, problems, err := status.Programmed(pinned.Tables)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}

	return frontends
}
