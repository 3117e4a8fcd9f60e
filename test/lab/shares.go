package lab

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// MustBeFair fails the test unless counts are those of a choice with these shares (see [CheckShares]), and if the check
// refuses what a perfect chooser does as often.
func MustBeFair(t testing.TB, what string, counts []int, shares []float64) {
	t.Helper()
	perfect, total := make([]int, len(shares)), 0
	for _, n := range counts {
		total += n
	}
	for range total {
		perfect[choice(shares)]++
	}
	if err := CheckShares(perfect, shares); err != nil {
		t.Errorf("a perfect chooser: %v", err)
	}
	if err := CheckShares(counts, shares); err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

// choice is one that a perfect chooser makes.
func choice(shares []float64) int {
	last, at := 0, rand.Float64()
	for i, share := range shares {
		if share == 0 {
			continue
		}
		last = i
		if at -= share; at < 0 {
			break
		}
	}

	return last
}

// mistaken is how often a check of shares is mistaken. A run of a thousand checks is once in 10⁶ times.
const mistaken = 1e-9

// CheckShares returns an error unless a choice with these probabilities may have given the counts (Pearson's
// chi-square test). It is mistaken once in 10⁹ times. A choice without a probability must not be made at all.
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
	if chance := chiSquareTail(freedom, chi2); freedom > 0 && chance < mistaken {
		return fmt.Errorf("chance gives %v, or worse, with a probability of %.1e: chi-square is %.1f", counts, chance, chi2)
	}

	return nil
}

// chiSquareTail is the probability that chi-square is at least x.
func chiSquareTail(freedom int, x float64) float64 {
	if x == 0 {
		return 1
	}
	tail, first := 0.0, float64(freedom%2)/2
	if freedom%2 == 1 {
		tail = math.Erfc(math.Sqrt(x / 2))
	}
	for i := first; i < float64(freedom)/2; i++ {
		gamma, _ := math.Lgamma(i + 1)
		tail += math.Exp(i*math.Log(x/2) - x/2 - gamma)
	}

	return tail
}

// Even are the shares of n choices with the same probability.
func Even(n int) []float64 {
	shares := make([]float64, n)
	for i := range shares {
		shares[i] = 1 / float64(n)
	}

	return shares
}
