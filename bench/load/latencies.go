package load

import (
	"math"
	"slices"
	"time"
)

// Latencies are those of single exchanges, all of them, the shortest first.
type Latencies []time.Duration

// Quantile is the latency that a part q of all do not exceed, q from 0 to 1: one
// that was measured (the nearest rank), not one between two. It is 0 if there is
// none.
func (l Latencies) Quantile(q float64) time.Duration {
	if len(l) == 0 {
		return 0
	}
	// Of 1,000 the quantile 0.999 is the 999th, whatever 0.999 is in binary.
	rank := int(math.Ceil(q*float64(len(l)) - 1e-9))

	return l[min(max(rank, 1), len(l))-1]
}

// Over is how many are longer than a limit.
func (l Latencies) Over(limit time.Duration) int {
	longer, _ := slices.BinarySearch(l, limit+1)

	return len(l) - longer
}

// samples are latencies as one client collects them. Room is made in large pieces,
// none of which is ever copied.
type samples struct {
	full [][]time.Duration
	open []time.Duration
}

const samplesPerPiece = 1 << 16

func newSamples() samples {
	return samples{open: make([]time.Duration, 0, samplesPerPiece)}
}

func (s *samples) add(latency time.Duration) {
	if len(s.open) == cap(s.open) {
		s.full = append(s.full, s.open)
		s.open = make([]time.Duration, 0, samplesPerPiece)
	}
	s.open = append(s.open, latency)
}

// sorted puts the samples of all clients in order.
func sorted(all []*samples) Latencies {
	var latencies Latencies
	for _, s := range all {
		latencies = append(latencies, slices.Concat(s.full...)...)
		latencies = append(latencies, s.open...)
	}
	slices.Sort(latencies)

	return latencies
}
