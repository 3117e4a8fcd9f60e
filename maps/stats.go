package maps

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"sync"

	"github.com/cilium/ebpf"
)

// The counts of [Stats] other than those by reason.
const (
	StatBytesSent     = uint32(256)
	StatBytesReceived = uint32(257)
)

// StatKey identifies a count of a service port id: the new flows with an outcome (What is a
// [Reason]), or bytes (What is one of the Stat constants).
type StatKey struct {
	ServicePortId uint32
	What          uint32
}

// PortCounts are the counts of a service port on one CPU.
type PortCounts = abiPortCounts

// RefusalKey identifies the count of refused new flows of a service port, by reason.
type RefusalKey = abiRefusalKey

// Stats are the maps port_counts and refusals: the counts of each service port in service_ports.
type Stats struct {
	counts   *chunked
	refusals *Map[RefusalKey, uint64]
	ports    *Map[uint32, ServicePort]

	zeroFrom uint32 // the places from here on have never been used: see Begin

	mu    sync.Mutex
	ended map[StatKey]uint64 // not yet taken by Ended; nil before its first call
}

// Capacity returns how many refusals, by service port and reason, can be counted.
func (s *Stats) Capacity() int { return s.refusals.Capacity() }

// All yields every count that is not zero, summed over all CPUs, in no order. It stops after the
// first error.
func (s *Stats) All() iter.Seq2[Entry[StatKey, uint64], error] {
	return func(yield func(Entry[StatKey, uint64], error) bool) {
		for port, err := range s.ports.All() {
			if err != nil {
				yield(Entry[StatKey, uint64]{}, err)

				return
			}
			counts, err := s.port(port.Key)
			if err != nil {
				yield(Entry[StatKey, uint64]{}, err)

				return
			}
			for what, n := range whats(counts) {
				if n != 0 && !yield(Entry[StatKey, uint64]{StatKey{port.Key, what}, n}, nil) {
					return
				}
			}
		}
		for refused, err := range s.refusals.All() {
			key := StatKey{refused.Key.ServicePortId, refused.Key.Reason}
			if !yield(Entry[StatKey, uint64]{key, refused.Value}, err) || err != nil {
				return
			}
		}
	}
}

// whats yields the counts in c.
func whats(c PortCounts) iter.Seq2[uint32, uint64] {
	return func(yield func(uint32, uint64) bool) {
		_ = yield(uint32(ReasonTranslated), c.Connections) &&
			yield(StatBytesSent, c.BytesSent) && yield(StatBytesReceived, c.BytesReceived)
	}
}

// port returns the counts of a service port, summed over all CPUs.
func (s *Stats) port(id uint32) (PortCounts, error) {
	var sum PortCounts
	m, at := s.place(id)
	if m == nil {
		return sum, nil
	}
	var perCPU []PortCounts
	if err := m.Lookup(at, &perCPU); err != nil {
		return sum, fmt.Errorf("map %s: lookup: %w", NamePortCounts, err)
	}
	for _, c := range perCPU {
		sum.Connections += c.Connections
		sum.BytesSent += c.BytesSent
		sum.BytesReceived += c.BytesReceived
	}

	return sum, nil
}

// place returns the chunk with the counts of a service port, or nil, and the index in it.
func (s *Stats) place(id uint32) (*ebpf.Map, uint32) {
	perChunk := s.counts.inner.MaxEntries

	return s.counts.have(int(Index(id) / perChunk)), Index(id) % perChunk
}

// Reserve implements [Counts].
func (s *Stats) Reserve(n int) error {
	need := chunksFor(n, int(s.counts.inner.MaxEntries))
	if n == 0 || s.counts.have(need-1) != nil {
		return nil
	}
	if err := s.counts.extend(need); err != nil && s.counts.have(need-1) == nil {
		return fmt.Errorf("map %s, %d places: %w: %w", NamePortCounts, n, ErrFull, err)
	}

	return nil
}

// Begin implements [Counts]. One goroutine calls it.
func (s *Stats) Begin(id uint32) error {
	if err := s.Reserve(int(Index(id)) + 1); err != nil {
		return err
	}
	if Index(id) >= s.zeroFrom { // in a chunk that this process has made
		s.zeroFrom = Index(id) + 1

		return nil
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("map %s: CPUs: %w", NamePortCounts, err)
	}
	m, at := s.place(id)
	if err := m.Put(at, make([]PortCounts, cpus)); err != nil {
		return fmt.Errorf("map %s: put: %w", NamePortCounts, err)
	}

	return nil
}

// End implements [Counts]. It keeps the last counts for [Stats.Ended].
func (s *Stats) End(id uint32) error {
	last := make(map[StatKey]uint64)
	counts, err := s.port(id)
	errs := []error{err}
	for what, n := range whats(counts) {
		if n != 0 {
			last[StatKey{id, what}] = n
		}
	}
	for reason := range uint32(reasonCount) {
		key := RefusalKey{ServicePortId: id, Reason: reason}
		n, ok, err := s.refusals.Lookup(key)
		if ok {
			last[StatKey{id, reason}] = n
			err = s.refusals.Delete(key)
		}
		errs = append(errs, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		maps.Copy(s.ended, last)
	}

	return errors.Join(errs...)
}

// Ended returns the final counts of the service ports whose ids were freed since the last call;
// the first call returns nothing.
func (s *Stats) Ended() map[StatKey]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := s.ended
	s.ended = make(map[StatKey]uint64)

	return ended
}

// Prune deletes the refusals of ids that no service port has, which an agent that was killed
// before it called [Stats.End] has left. No other goroutine may call End or Begin meanwhile.
func (s *Stats) Prune() error {
	var gone []RefusalKey // deleted after the iteration, which deletes would disturb
	for e, err := range s.refusals.All() {
		if err != nil {
			return err
		}
		_, ok, err := s.ports.Lookup(e.Key.ServicePortId)
		if err != nil {
			return err
		}
		if !ok {
			gone = append(gone, e.Key)
		}
	}
	for _, key := range gone {
		if err := s.refusals.Delete(key); err != nil {
			return err
		}
	}

	return nil
}
