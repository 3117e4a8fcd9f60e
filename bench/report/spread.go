package report

import (
	"math"
	"slices"
)

// Spread tells of the values of several rounds. Quartiles lie between two
// values, linearly, where there is none just there.
type Spread struct {
	Rounds int     `json:"rounds"` // how many values there are; of none, nothing else means anything
	Median float64 `json:"median"`
	Low    float64 `json:"low"`  // lower quartile
	High   float64 `json:"high"` // upper quartile
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spreadOf tells of values in any order. They stay as they are.
func spreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sorted := slices.Sorted(slices.Values(values))

	return Spread{
		Rounds: len(sorted),
		Median: quantile(sorted, 0.5),
		Low:    quantile(sorted, 0.25),
		High:   quantile(sorted, 0.75),
		Min:    sorted[0],
		Max:    sorted[len(sorted)-1],
	}
}

// quantile returns what a part q of the values lies below. There must be some.
func quantile(sorted []float64, q float64) float64 {
	place := q * float64(len(sorted)-1)
	below := int(math.Floor(place))
	above := int(math.Ceil(place))

	return sorted[below] + (place-float64(below))*(sorted[above]-sorted[below])
}

// noise is how far the values lie from their median at most, as a part of it.
func (s Spread) noise() float64 {
	if s.Rounds == 0 || s.Median == 0 {
		return 0
	}

	return max(s.Max-s.Median, s.Median-s.Min) / s.Median
}
