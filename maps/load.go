package maps

import (
	"fmt"
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
	memory []byte
}

func mapLoads(m *ebpf.Map) (*MappedLoads, error) {
	size := int(LoadCells) * int(unsafe.Sizeof(BackendLoad{}))
	memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: memory: %w", NameBackendLoad, err)
	}

	return &MappedLoads{memory: memory}, nil
}

func (l *MappedLoads) cell(id uint32) *BackendLoad {
	at := uintptr(id%LoadCells) * unsafe.Sizeof(BackendLoad{})

	return (*BackendLoad)(unsafe.Pointer(&l.memory[at]))
}

// Load implements [Loads].
func (l *MappedLoads) Load(id uint32) BackendLoad {
	cell := l.cell(id)

	return BackendLoad{Sockets: atomic.LoadInt32(&cell.Sockets), Flows: atomic.LoadInt32(&cell.Flows)}
}

// AddFlows adds n, which may be negative, to the flows of backend id.
func (l *MappedLoads) AddFlows(id uint32, n int32) { atomic.AddInt32(&l.cell(id).Flows, n) }

func (l *MappedLoads) close() error {
	if l == nil || l.memory == nil {
		return nil
	}
	err := unix.Munmap(l.memory)
	l.memory = nil

	return err
}

// FakeLoads are [Loads] in memory, by id.
type FakeLoads map[uint32]BackendLoad

// Load implements [Loads].
func (l FakeLoads) Load(id uint32) BackendLoad { return l[id] }
