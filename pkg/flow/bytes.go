package flow

import (
	stdmaps "maps"
	"sync"

	"github.com/sluice-lb/sluice/maps"
)

// Bytes is what the clients of a service port have sent and received.
type Bytes struct {
	Sent, Received uint64
}

// uncountedBytes are the bytes of flows that the Sweeper has ended, by service port id, which programs
// had not counted yet.
type uncountedBytes struct {
	mu     sync.Mutex
	byPort map[uint32]Bytes
}

// add adds the uncounted bytes of an entry that is deleted.
func (t *uncountedBytes) add(f *maps.Flow) {
	if f.Bytes == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byPort == nil {
		t.byPort = make(map[uint32]Bytes)
	}
	b := t.byPort[f.ServicePortId]
	if f.Role == maps.FlowFromClient {
		b.Sent += f.Bytes
	} else {
		b.Received += f.Bytes
	}
	t.byPort[f.ServicePortId] = b
}

// Bytes returns what the flows that this Sweeper has ended had sent and received since programs last
// counted it, by service port id: [maps.Stats] does not include it. Ids that no longer exist are
// dropped from time to time. Any goroutine may call it.
func (s *Sweeper) Bytes() map[uint32]Bytes {
	s.bytes.mu.Lock()
	defer s.bytes.mu.Unlock()

	return stdmaps.Clone(s.bytes.byPort)
}

// manyPorts is the number of ids from which on dropUnknownPorts checks them.
const manyPorts = 4096

// dropUnknownPorts drops the bytes of service port ids that no longer exist.
func (s *Sweeper) dropUnknownPorts() error {
	known := s.Bytes()
	if len(known) < manyPorts {
		return nil
	}
	for id := range known {
		_, ok, err := s.maps.ServicePorts.Lookup(id)
		if err != nil {
			return err
		}
		if !ok {
			s.bytes.mu.Lock()
			delete(s.bytes.byPort, id)
			s.bytes.mu.Unlock()
		}
	}

	return nil
}
