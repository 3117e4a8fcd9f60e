package lab

import (
	"fmt"
	"math"
)

// CheckShares returns an error unless a choice with these probabilities may have given the counts. It is
// mistaken once in 10⁹ times, so a run of a thousand checks is once in 10⁶. A choice without a probability
// must not be made at all.
func CheckShares(counts []int, shares []float64) error {
	total, freedom, chi2 := 0, -1, 0.0
	for _, n := range counts {
		total += n
	}
	for i, share := range shares {
		expected := share * float64(total)
		switch {
		case share > 0:
			freedom++
			chi2 += (float64(counts[i]) - expected) * (float64(counts[i]) - expected) / expected
		case counts[i] > 0:
			return fmt.Errorf("number %d of %v is chosen, and must not be", i, counts)
		}
	}
	if bound := chiSquareBound(freedom); freedom > 0 && chi2 > bound {
		return fmt.Errorf("chi-square of %v is %.1f, want at most %.1f", counts, chi2, bound)
	}

	return nil
}

// chiSquareBound is exceeded by chance once in some 10⁹ times, by the approximation of Wilson
// and Hilferty, which holds for few degrees of freedom as well.
func chiSquareBound(freedom int) float64 {
	const deviations = 6
	spread := 2 / (9 * float64(freedom))

	return float64(freedom) * math.Pow(1-spread+deviations*math.Sqrt(spread), 3)
}

// Even are the shares of n choices with the same probability.
func Even(n int) []float64 {
	shares := make([]float64, n)
	for i := range shares {
		shares[i] = 1 / float64(n)
	}

	return shares
}
