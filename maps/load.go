package maps

import (
	"iter"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// LoadCells is how many backends can have a load of their own: ids that are
// equal modulo LoadCells share a cell.
const LoadCells = uint32(treatyLoadLimitLOAD_CELLS)

// BackendLoad is how much a backend has to do for clients that this node
// translates, in connections.
type BackendLoad = treatyBackendLoad

// Live returns how many connections the backend has in all.
func (l treatyBackendLoad) Live() int { return int(l.Sockets) + int(l.Flows) }

// Loads tells how much each backend has to do. [MappedLoads] is the kernel's,
// [FakeLoads] is a test's.
type Loads interface {
	// Load returns the load of the cell that backend id has.
	Load(id uint32) BackendLoad
}

// MappedLoads are the backend_load map in this process' memory. Programs count
// in it at the same time.
type MappedLoads struct {
	*windows
}

// loadSize is the size of a cell, in bytes.
const loadSize = int(unsafe.Sizeof(BackendLoad{}))

func mapLoads(m *ebpf.Map) *MappedLoads {
	return &MappedLoads{newWindows(NameBackendLoad, m, loadSize)}
}

// cell returns where a load is. One that the process has no memory for counts for
// nothing; what is wrong with it is put right later.
func (l *MappedLoads) cell(id uint32) *BackendLoad {
	at, err := l.at(int(id%LoadCells) * loadSize)
	if err != nil {
		return new(BackendLoad)
	}

	return (*BackendLoad)(at)
}

// Load implements [Loads].
func (l *MappedLoads) Load(id uint32) BackendLoad { return l.cell(id).read() }

func (l *treatyBackendLoad) read() BackendLoad {
	return BackendLoad{Sockets: atomic.LoadInt32(&l.Sockets), Flows: atomic.LoadInt32(&l.Flows)}
}

// AddFlows adds n, which may be negative, to the flows of backend id.
func (l *MappedLoads) AddFlows(id uint32, n int32) { atomic.AddInt32(&l.cell(id).Flows, n) }

// All yields every cell that is not zero, in order. It stops after the first error.
// The memory that it takes for that is the process' only meanwhile.
func (l *MappedLoads) All() iter.Seq2[Entry[uint32, BackendLoad], error] {
	return func(yield func(Entry[uint32, BackendLoad], error) bool) {
		for i := range l.first {
			memory, err := l.look(i)
			if err != nil {
				yield(Entry[uint32, BackendLoad]{}, err)

				return
			}
			more := yieldLoads(memory, uint32(i*windowSize/loadSize), yield)
			if err := unix.Munmap(memory); err != nil {
				yield(Entry[uint32, BackendLoad]{}, err)

				return
			}
			if !more {
				return
			}
		}
	}
}

// yieldLoads yields the cells in memory, of which base is the first.
func yieldLoads(memory []byte, base uint32, yield func(Entry[uint32, BackendLoad], error) bool) bool {
	cells := unsafe.Slice((*BackendLoad)(unsafe.Pointer(&memory[0])), len(memory)/loadSize)
	for i := range cells {
		load := cells[i].read()
		if load != (BackendLoad{}) && !yield(Entry[uint32, BackendLoad]{base + uint32(i), load}, nil) {
			return false
		}
	}

	return true
}

// FakeLoads are [Loads] in memory, by id.
type FakeLoads map[uint32]BackendLoad

// Load implements [Loads].
func (l FakeLoads) Load(id uint32) BackendLoad { return l[id] }
