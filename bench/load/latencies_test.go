package load

import (
	"bytes"
	"encoding/gob"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// Quantiles are those of the nearest rank, with three digits, also of several clients
// and after a way through a pipe.
func TestQuantiles(t *testing.T) {
	for _, size := range []int{1, 2, 3, 10, 99, 100, 1000, 150_000} {
		clients := []Latencies{newLatencies(), newLatencies(), newLatencies()}
		for i, value := range rand.Perm(size) { // 1 to size, in any order, counted by three clients
			clients[i%3].add(time.Duration(value + 1))
		}
		sent := newLatencies()
		for _, client := range clients {
			sent.Merge(client.Histogram)
		}
		var latencies Latencies
		var pipe bytes.Buffer
		if err := gob.NewEncoder(&pipe).Encode(sent); err != nil {
			t.Fatal(err)
		}
		if err := gob.NewDecoder(&pipe).Decode(&latencies); err != nil {
			t.Fatal(err)
		}
		if latencies.Count() != size {
			t.Fatalf("of %d there are %d", size, latencies.Count())
		}
		// In thousandths, so that nothing is rounded: the rank that is nearest to q of all.
		for q := range 1001 {
			if q*size%1000 == 500 { // there are two
				continue
			}
			want := max((q*size+500)/1000, 1)
			got := latencies.Quantile(float64(q) / 1000)
			if math.Abs(float64(got)-float64(want)) > float64(want)/1000 {
				t.Errorf("quantile %d/1000 of %d is %d, want %d", q, size, got, want)
			}
		}
	}
	few := newLatencies()
	for _, latency := range []time.Duration{1, 2, 2, 3} {
		few.add(latency)
	}
	for limit, want := range []int{4, 3, 1, 0, 0} {
		if got := few.Over(time.Duration(limit)); got != want {
			t.Errorf("%d are over %d, want %d", got, limit, want)
		}
	}
	few.add(2 * time.Hour)
	if got := few.Quantile(1); got < time.Hour {
		t.Errorf("what is too long for the histogram counts as %v", got)
	}
	for name, none := range map[string]Latencies{"of nothing": {}, "of no exchange": newLatencies()} {
		if got := none.Quantile(0.5); got != 0 {
			t.Errorf("quantile %s is %v", name, got)
		}
	}
}
