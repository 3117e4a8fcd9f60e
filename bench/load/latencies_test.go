package load

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestQuantilesAreExact(t *testing.T) {
	for _, size := range []int{1, 2, 3, 10, 99, 100, 1000, samplesPerPiece, 2*samplesPerPiece + 17} {
		// 1 to size, in any order, collected by three clients.
		var all []*samples
		for range 3 {
			s := newSamples()
			all = append(all, &s)
		}
		for i, value := range rand.Perm(size) {
			all[i*i%3].add(time.Duration(value + 1))
		}
		latencies := sorted(all)
		if len(latencies) != size {
			t.Fatalf("of %d there are %d", size, len(latencies))
		}
		// In thousandths, so that nothing is rounded: the least rank that is at least
		// q of all.
		for q := range 1001 {
			want := max((q*size+999)/1000, 1)
			if got := latencies.Quantile(float64(q) / 1000); got != time.Duration(want) {
				t.Errorf("quantile %d/1000 of %d is %d, want %d", q, size, got, want)
			}
		}
	}
	few := Latencies{1, 2, 2, 3}
	for limit, want := range []int{4, 3, 1, 0, 0} {
		if got := few.Over(time.Duration(limit)); got != want {
			t.Errorf("%d of %v are over %d, want %d", got, few, limit, want)
		}
	}
	if got := (Latencies)(nil).Quantile(0.5); got != 0 {
		t.Errorf("quantile of none is %v", got)
	}
}
