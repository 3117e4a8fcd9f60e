package maps

import "sync/atomic"

// BackendLoad is the load of a backend by clients that this node translates, in connections.
type BackendLoad = abiBackendLoad

// Live returns the number of connections of the backend.
func (l abiBackendLoad) Live() int { return int(l.Sockets) + int(l.Flows) }

// BackendHandshakes are the TCP handshakes of a backend.
type BackendHandshakes = abiBackendHandshakes

// Loads are the loads of all backends: the backend_load map in this process' memory. Programs
// write it, too.
type Loads struct {
	*Array[BackendLoad]

	handshakes *Array[BackendHandshakes] // nil unless they are counted
}

// Reserve makes places 0 to n-1 exist, see [Array.Reserve].
func (l Loads) Reserve(n int) error {
	if l.handshakes != nil {
		if err := l.handshakes.Reserve(n); err != nil {
			return err
		}
	}

	return l.Array.Reserve(n)
}

// Begin makes the place of a new backend, and clears what its predecessor there has left.
func (l Loads) Begin(place uint32) error {
	if err := l.Reserve(int(place) + 1); err != nil || l.handshakes == nil {
		return err
	}

	return l.handshakes.Put(place, BackendHandshakes{})
}

// Handshakes returns those of the backend with this id; none if they are not counted.
func (l Loads) Handshakes(id uint32) BackendHandshakes {
	var h BackendHandshakes
	if l.handshakes != nil {
		loadCounts(l.handshakes.place(Index(id)), &h)
	}

	return h
}

// Load returns the load of the backend with this id, or of an earlier one in the same place.
func (l Loads) Load(id uint32) BackendLoad { return l.Get(Index(id)) }

// AddFlows adds n, which may be negative, to the flows of the backend with this id.
func (l Loads) AddFlows(id uint32, n int32) {
	if at := l.place(Index(id)); at != nil {
		atomic.AddUint32(&at[1], uint32(n))
	}
}
