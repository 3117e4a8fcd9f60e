package mapstest

import (
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Shares are the shares of new flows that an algorithm gives backends with these loads: even ones, also of many
// clients if it hashes, unless it compares loads.
func Shares(algorithm uint8, loads []int32) []float64 {
	switch algorithm {
	case maps.AlgorithmLC:
		return sharesOfTwo(loads)
	case maps.AlgorithmSED, maps.AlgorithmNQ:
		return sharesOfLeast(loads)
	}

	return lab.Even(len(loads))
}

// sharesOfLeast are even ones of those that have the least load.
func sharesOfLeast(loads []int32) []float64 {
	shares, least := make([]float64, len(loads)), slices.Min(loads)
	n := 0
	for _, load := range loads {
		if load == least {
			n++
		}
	}
	for i, load := range loads {
		if load == least {
			shares[i] = 1 / float64(n)
		}
	}

	return shares
}

// sharesOfTwo are those of a choice of the lesser load of two at random, of any of both if they are equal.
func sharesOfTwo(loads []int32) []float64 {
	if len(loads) == 1 {
		return lab.Even(1)
	}
	shares, pair := make([]float64, len(loads)), 1/float64(len(loads)*(len(loads)-1))
	for first, a := range loads {
		for second, b := range loads {
			switch {
			case first == second:
			case b < a:
				shares[second] += pair
			default:
				shares[first] += pair
			}
		}
	}

	return shares
}
