package report

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/aclements/go-moremath/stats"
	"golang.org/x/perf/benchmath"
)

// Spread summarizes the values of several rounds.
type Spread struct {
	Rounds int     `json:"rounds"` // how many values there are; of none, nothing else means anything
	Median float64 `json:"median"`
	Low    float64 `json:"low"`  // lower quartile
	High   float64 `json:"high"` // upper quartile
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// SpreadOf summarizes values in any order. They stay as they are.
func SpreadOf(values []float64) Spread {
	if len(values) == 0 {
		return Spread{}
	}
	sample := benchmath.NewSample(slices.Clone(values), &benchmath.DefaultThresholds)
	sorted := stats.Sample{Xs: sample.Values, Sorted: true}

	return Spread{
		Rounds: len(values),
		Median: benchmath.AssumeNothing.Summary(sample, 0.95).Center,
		Low:    sorted.Quantile(0.25),
		High:   sorted.Quantile(0.75),
		Min:    sample.Values[0],
		Max:    sample.Values[len(values)-1],
	}
}

// noise returns the largest distance of a value from the median, as a part of it.
func (s Spread) noise() float64 {
	if s.Rounds == 0 || s.Median == 0 {
		return 0
	}

	return max(s.Max-s.Median, s.Median-s.Min) / s.Median
}

// format writes the median, and half of the distance between the quartiles as a part
// of it.
func (s Spread) format() string {
	text := formatValue(s.Median)
	if s.Rounds < 2 || s.Median == 0 {
		return text
	}
	percent := 100 * (s.High - s.Low) / 2 / math.Abs(s.Median)
	if percent < 9.95 {
		return fmt.Sprintf("%s ±%.1f %%", text, percent)
	}

	return fmt.Sprintf("%s ±%.0f %%", text, percent)
}

// formatRatio writes a median ratio to something with its quartiles, unless there is
// only one ratio.
func (s Spread) formatRatio(to string) string {
	text := formatRatio(s.Median) + to
	if s.Rounds < 2 {
		return text
	}

	return text + " (" + formatRatio(s.Low) + "–" + formatRatio(s.High) + ")"
}

// values are samples by what they measure, and then by round.
type values map[key]map[int]float64

// valuesOf sorts samples. Of two of the same round the later counts.
func valuesOf(samples []Sample) values {
	v := make(values)
	for _, sample := range samples {
		if v[sample.key()] == nil {
			v[sample.key()] = make(map[int]float64)
		}
		v[sample.key()][sample.Round] = sample.Value
	}

	return v
}

func (v values) spread(k key) Spread { return SpreadOf(slices.Collect(maps.Values(v[k]))) }

// toRef compares with the node that has no proxy: the path's control there.
func (v values) toRef(k key) Spread {
	control := k
	control.side, control.path = Ref, controlOf(k.path)

	return v.ratio(k, control)
}

// toDirect compares with the path's control at the same side.
func (v values) toDirect(k key) Spread {
	control := k
	control.path = controlOf(k.path)

	return v.ratio(k, control)
}

// toSide compares with the same path at another side.
func (v values) toSide(k key, side string) Spread {
	other := k
	other.side = side

	return v.ratio(k, other)
}

// ratio divides the values of a by those of b, round by round: the machine may have
// been slower an hour before. The ratio of a key to itself is empty.
func (v values) ratio(a, b key) Spread {
	var ratios []float64
	for round, value := range v[a] {
		if other, ok := v[b][round]; ok && other != 0 && a != b {
			ratios = append(ratios, value/other)
		}
	}

	return SpreadOf(ratios)
}
