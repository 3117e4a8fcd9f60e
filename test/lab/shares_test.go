package lab

import (
	"fmt"
	"math"
	"testing"
)

// The tail is that of tables of the distribution.
func TestChiSquareTail(t *testing.T) {
	for _, test := range []struct {
		freedom int
		x, want float64
	}{
		{1, 3.841, 0.05}, {1, 37.32, 1e-9}, {2, 13.816, 0.001}, {2, 41.45, 1e-9}, {4, 47.88, 1e-9}, {5, 20.515, 0.001}, {6, 53.34, 1e-9},
		{11, 65.17, 1e-9}, {59, 148.94, 1e-9}, {99, 207.90, 1e-9}, {9999, 9999 - 2.0/3, 0.5},
	} {
		if tail := chiSquareTail(test.freedom, test.x); math.Abs(tail/test.want-1) > 0.02 {
			t.Errorf("with %d degrees of freedom, beyond %v are %v, want %v", test.freedom, test.x, tail, test.want)
		}
	}
}

// What the suites of fairness see by as many flows as they begin: a backend that gets nothing, or three times its share. The
// counts are the averages of such a choice.
func TestSharesOfUnfairChoices(t *testing.T) {
	for _, test := range []struct{ backends, flows int }{{4, 400}, {5, 400}, {6, 600}, {7, 600}, {10, 600}} {
		for _, favour := range []float64{0, 1, 3} {
			t.Run(fmt.Sprintf("%d flows among %d, one of which gets %v shares", test.flows, test.backends, favour), func(t *testing.T) {
				counts, all := make([]int, test.backends), favour+float64(test.backends-1)
				for i := range counts {
					counts[i] = int(math.Round(float64(test.flows) / all))
				}
				counts[test.backends/2] = int(math.Round(favour * float64(test.flows) / all))
				if err := CheckShares(counts, Even(test.backends)); (err == nil) != (favour == 1) {
					t.Errorf("%d: %v", counts, err)
				}
			})
		}
	}
	if err := CheckShares([]int{200, 199, 1}, []float64{0.5, 0.5, 0}); err == nil {
		t.Error("one that must not be chosen is")
	}
}
