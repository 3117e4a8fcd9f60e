package maps

import (
	"errors"
	"fmt"
	"iter"

	"github.com/cilium/ebpf"
)

// What [Stats] counts beside reasons.
const (
	StatBytesSent     = uint32(treatyStatSTAT_BYTES_SENT)
	StatBytesReceived = uint32(treatyStatSTAT_BYTES_RECEIVED)
)

// StatKey says what is counted, of which frontend id: new flows by what became
// of them (What is a [Reason]), or bytes (one of the Stat constants).
type StatKey = treatyStatKey

// Stats is the stats map: what programs have counted of each frontend id. Those
// of ids that nobody uses any more stay until Delete.
type Stats struct {
	m *ebpf.Map
}

// Capacity returns how many counts the map can hold.
func (s *Stats) Capacity() int { return int(s.m.MaxEntries()) }

// All yields every count, of all CPUs together, in no order. It stops after the
// first error. Counts that come or go meanwhile may be missed or seen twice.
func (s *Stats) All() iter.Seq2[Entry[StatKey, uint64], error] {
	return func(yield func(Entry[StatKey, uint64], error) bool) {
		cpus, err := ebpf.PossibleCPU()
		if err != nil {
			yield(Entry[StatKey, uint64]{}, fmt.Errorf("map %s: CPUs: %w", NameStats, err))

			return
		}
		var cursor ebpf.MapBatchCursor
		keys, perCPU := make([]StatKey, batch), make([]uint64, batch*cpus)
		for {
			n, err := s.m.BatchLookup(&cursor, keys, perCPU, nil)
			last := errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !last {
				yield(Entry[StatKey, uint64]{}, fmt.Errorf("map %s: read: %w", NameStats, err))

				return
			}
			for i := range n {
				if !yield(Entry[StatKey, uint64]{keys[i], sum(perCPU[i*cpus:][:cpus])}, nil) {
					return
				}
			}
			if last {
				return
			}
		}
	}
}

func sum(perCPU []uint64) uint64 {
	var all uint64
	for _, n := range perCPU {
		all += n
	}

	return all
}

// Delete forgets a count. Forgetting an absent one is not an error.
func (s *Stats) Delete(key StatKey) error {
	if err := s.m.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("map %s: delete: %w", NameStats, err)
	}

	return nil
}
