package maps

import (
	"iter"
	"sync/atomic"
)

// BackendLoad is the load of a backend by clients that this node translates, in connections.
type BackendLoad = abiBackendLoad

// Live returns the number of connections of the backend.
func (l abiBackendLoad) Live() int { return int(l.Sockets) + int(l.Flows) }

// Loads are the loads of all backends: the backend_load map in this process' memory. Programs
// write it, too.
type Loads struct {
	*Array[BackendLoad]
}

// Load returns the load of the backend with this id, or of an earlier one in the same place.
func (l Loads) Load(id uint32) BackendLoad { return l.Get(Index(id)) }

// AddFlows adds n, which may be negative, to the flows of the backend with this id.
func (l Loads) AddFlows(id uint32, n int32) {
	if at := l.place(Index(id)); at != nil {
		atomic.AddUint32(&at[1], uint32(n))
	}
}

// All yields every load that is not zero, in order, by the index of the backend's id.
func (l Loads) All() iter.Seq2[uint32, BackendLoad] { return l.Array.All() }
