package report

import (
	"maps"
	"slices"
)

// values are samples by what they are of, and then by round.
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

func (v values) spread(k key) Spread {
	return spreadOf(slices.Collect(maps.Values(v[k])))
}

// toRef compares with the node that has no proxy: the path's control there.
func (v values) toRef(k key) Spread {
	control := k
	control.side, control.path = Ref, controlOf(k.path)
	if k == control {
		return Spread{}
	}

	return v.ratio(k, control)
}

// toDirect compares with the path's control at the same side.
func (v values) toDirect(k key) Spread {
	control := k
	control.path = controlOf(k.path)
	if k == control {
		return Spread{}
	}

	return v.ratio(k, control)
}

// toSide compares with the same path at another side.
func (v values) toSide(k key, side string) Spread {
	other := k
	other.side = side

	return v.ratio(k, other)
}

// ratio is how many times b a is. Only values of the same round are compared,
// since the machine may have been another one an hour before.
func (v values) ratio(a, b key) Spread {
	var ratios []float64
	for round, value := range v[a] {
		if other, ok := v[b][round]; ok && other != 0 {
			ratios = append(ratios, value/other)
		}
	}

	return spreadOf(ratios)
}
