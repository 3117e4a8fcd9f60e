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

// tallies are the bytes of flows that the Sweeper has ended, by service port id: those
// that programs had not counted yet.
type tallies struct {
	mu     sync.Mutex
	byPort map[uint32]Bytes
}

// add takes over what an entry that is deleted has not told.
func (t *tallies) add(f *maps.Flow) {
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

// Bytes returns what the flows that this Sweeper has ended had sent and received
// since programs last counted it, by service port id: it is in no count of
// [maps.Stats]. Ids that have gone are forgotten now and then. Any goroutine may
// call it.
func (s *Sweeper) Bytes() map[uint32]Bytes {
	s.bytes.mu.Lock()
	defer s.bytes.mu.Unlock()

	return stdmaps.Clone(s.bytes.byPort)
}

// manyTallies is when those of ids that have gone are looked for.
const manyTallies = 4096

// forgetTallies drops the tallies of service port ids that stand for nothing any more.
func (s *Sweeper) forgetTallies() error {
	known := s.Bytes()
	if len(known) < manyTallies {
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
