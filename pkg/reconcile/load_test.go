package reconcile

import (
	"fmt"
	stdmaps "maps"
	"slices"
	"testing"

	"github.com/sluice-lb/sluice/maps"
)

// guardedLoads are the loads of backends, with whose they are. Connections may
// outlive their backend.
type guardedLoads struct {
	cells map[uint32]maps.BackendLoad
	owner map[uint32]loadOwner // by cell: the last backend there
}

// loadOwner is a backend, by what makes it the same one.
type loadOwner struct {
	id      uint32
	backend maps.Backend
}

func newGuardedLoads() *guardedLoads {
	return &guardedLoads{cells: make(map[uint32]maps.BackendLoad), owner: make(map[uint32]loadOwner)}
}

// Load implements [maps.Loads].
func (l *guardedLoads) Load(id uint32) maps.BackendLoad { return l.cells[id%maps.LoadCells] }

// begin takes note of a backend, and says so if the load of its cell is another
// one's.
func (l *guardedLoads) begin(id uint32, b maps.Backend) error {
	cell := id % maps.LoadCells
	b.Flags = 0
	is := loadOwner{id, b}
	was, ok := l.owner[cell]
	l.owner[cell] = is
	if load := l.cells[cell]; ok && was != is && load != (maps.BackendLoad{}) {
		return fmt.Errorf("backend %d of %s has %d connections of backend %d, %s",
			id, b.AddrPort(), load.Live(), was.id, was.backend.AddrPort())
	}

	return nil
}

// changeLoads lets connections begin and end. To a backend that is gone, none
// begin any more.
func (o *ordeal) changeLoads() {
	loads := o.guard.loads
	for _, cell := range slices.Sorted(stdmaps.Keys(loads.owner)) {
		if o.chance(90) {
			continue
		}
		if _, lives := o.guard.Backends.Entries[loads.owner[cell].id]; lives {
			loads.cells[cell] = maps.BackendLoad{Sockets: int32(o.IntN(3)), Flows: int32(o.IntN(2))}
		} else if o.chance(30) {
			delete(loads.cells, cell)
		}
	}
}

// wrap has backend ids begin anew, as after four billion of them, or where they
// share the cells of those in use.
func (o *ordeal) wrap() {
	switch o.IntN(3) {
	case 0:
		o.r.backendIDs.next = 1
	case 1:
		o.r.backendIDs.next = maps.LoadCells + 1
	}
}

// cellLoads are loads by cell.
type cellLoads map[uint32]maps.BackendLoad

func (l cellLoads) Load(id uint32) maps.BackendLoad { return l[id%maps.LoadCells] }

func TestBackendIDs(t *testing.T) {
	loads := cellLoads{3: {Sockets: 1}, 5: {Flows: 2}, 6: {Sockets: 1, Flows: -1}}
	s := newBackendIDs(loads)
	s.adopt(2)
	s.next = 1
	mustTake := func(want ...uint32) {
		t.Helper()
		for _, id := range want {
			if got := s.take(); got != id {
				t.Fatalf("took %d, want %d", got, id)
			}
		}
	}
	mustTake(1, 4, 7) // 2 is in use, the others have connections
	delete(loads, 5)
	s.next = maps.LoadCells + 1
	mustTake(maps.LoadCells+5, maps.LoadCells+8) // cells 1, 2, 4 and 7 are others'
	s.free(4)
	s.next = 2*maps.LoadCells + 1
	mustTake(2*maps.LoadCells + 4)
	s.free(2*maps.LoadCells + 4)
	loads[4] = maps.BackendLoad{Sockets: 1} // of connections to the one that was freed
	s.next = 1
	mustTake(9)
}

// Where no id is free of connections, one is taken all the same.
func TestBackendIDsAreFoundSoon(t *testing.T) {
	s := newBackendIDs(busyLoads{})
	if a, b := s.take(), s.take(); a == 0 || a == b {
		t.Errorf("took %d and %d", a, b)
	}
}

type busyLoads struct{}

func (busyLoads) Load(uint32) maps.BackendLoad { return maps.BackendLoad{Sockets: 1} }

// Where no cell is free, take looks for one once and not for every id, until an id
// is given back.
func TestBackendIDsOfFullCells(t *testing.T) {
	var asked int
	s := newBackendIDs(countedLoads{&asked})
	taken := s.take()
	for range 1000 {
		taken = s.take()
	}
	if limit := int(maps.LoadCells) + maxPassed; asked > limit {
		t.Errorf("looked at %d loads, want at most %d", asked, limit)
	}
	s.free(taken)
	asked = 0
	if s.take(); asked == 0 {
		t.Error("does not look for a free cell after one was given back")
	}
}

// countedLoads has connections everywhere.
type countedLoads struct{ asked *int }

func (l countedLoads) Load(uint32) maps.BackendLoad {
	*l.asked++

	return maps.BackendLoad{Sockets: 1}
}
