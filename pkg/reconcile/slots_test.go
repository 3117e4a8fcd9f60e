package reconcile

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// Slots are allocated to one run at a time; freed runs can be allocated again, in one piece if they
// were neighbours.
func TestSpans(t *testing.T) {
	for seed := range uint64(50) {
		testSpans(t, rand.New(rand.NewPCG(seed, 1)))
	}
}

func testSpans(t *testing.T, random *rand.Rand) {
	t.Helper()
	const size = 200
	s := newSpans(func() int { return size })
	var taken [size]bool
	var live []span
	for range 2000 {
		switch n := random.IntN(3); {
		case n == 0 && len(live) > 0:
			i := random.IntN(len(live))
			s.give(live[i])
			setAll(&taken, live[i], false)
			live = append(live[:i], live[i+1:]...)
		case n == 1:
			want := span{uint32(random.IntN(size - 8)), uint32(1 + random.IntN(8))}
			if ok := s.mark(want); ok != isFree(taken[:], want) {
				t.Fatalf("mark %v: %v", want, ok)
			} else if ok {
				setAll(&taken, want, true)
				live = append(live, want)
			}
		default:
			count := 1 + random.IntN(12)
			got, err := s.take(count)
			ok := err == nil
			if ok && (int(got.count) != count || !isFree(taken[:], got)) {
				t.Fatalf("take %d: %v", count, got)
			}
			if !ok && hasRoom(taken[:], count) {
				t.Fatalf("take %d: none, but there is room", count)
			}
			if ok {
				setAll(&taken, got, true)
				live = append(live, got)
			}
		}
		checkSpans(t, s, taken[:])
	}
}

// checkSpans compares s with what is taken, and looks for holes that touch.
func checkSpans(t *testing.T, s spans, taken []bool) {
	t.Helper()
	used, end := 0, uint64(0)
	for _, hole := range s.holes {
		if uint64(hole.base) <= end || hole.count == 0 || !isFree(taken, clip(hole, len(taken))) {
			t.Fatalf("holes %v", s.holes)
		}
		end = hole.end()
	}
	for _, is := range taken {
		if is {
			used++
		}
	}
	if s.used != used {
		t.Fatalf("counts %d in use, %d are", s.used, used)
	}
}

func isFree(taken []bool, s span) bool {
	if s.count == 0 {
		return true
	}
	if s.base == 0 || int(s.end()) > len(taken) {
		return false
	}
	for i := uint64(s.base); i < s.end(); i++ {
		if taken[i] {
			return false
		}
	}

	return true
}

func setAll(taken *[200]bool, s span, to bool) {
	for i := uint64(s.base); i < s.end(); i++ {
		taken[i] = to
	}
}

func hasRoom(taken []bool, count int) bool {
	for base := range taken {
		if isFree(taken, span{uint32(base), uint32(count)}) {
			return true
		}
	}

	return false
}

// clip is the part of a span below an end.
func clip(s span, end int) span {
	if s.end() > uint64(end) {
		s.count = uint32(max(end-int(s.base), 0))
	}

	return s
}

func TestSpansOfNothing(t *testing.T) {
	for _, n := range []int{0, 1} {
		s := newSpans(func() int { return n })
		if got, err := s.take(1); err == nil {
			t.Errorf("%d slots: took %v", n, got)
		}
		if s.mark(span{0, 1}) {
			t.Errorf("%d slots: marked slot 0", n)
		}
	}
}

// A span at the end of the numbers does not wrap around.
func TestMarkDoesNotWrap(t *testing.T) {
	s := newSpans(func() int { return 100 })
	if !s.mark(span{1<<32 - 2, 1}) {
		t.Error("did not mark the one before the last")
	}
	for _, want := range []span{{50, 1<<32 - 1}, {1<<32 - 1, 2}, {1<<32 - 1, 1<<32 - 1}, {1<<32 - 3, 2}} {
		if s.mark(want) {
			t.Errorf("marked %v", want)
		}
	}
}

// below allocates what was adopted and everything between.
func TestSpansBelow(t *testing.T) {
	s := newSpans(func() int { return 100 })
	s.mark(span{3, 2})
	s.mark(span{8, 1})
	if got, want := fmt.Sprint(s.below(11)), "[1+2 5+3 9+2]"; got != want {
		t.Errorf("below 11 %s were free, want %s", got, want)
	}
	if got, err := s.take(2); got.base != 11 || err != nil {
		t.Errorf("took %v, %v, want 11+2", got, err)
	}
}

func BenchmarkTakeFromManyHoles(b *testing.B) {
	s := newSpans(func() int { return 1 << 21 })
	var live []span
	for range 40000 {
		got, _ := s.take(10)
		live = append(live, got)
	}
	for i := 0; i < len(live); i += 2 {
		s.give(live[i])
	}
	b.ReportMetric(float64(len(s.holes)), "holes")
	for b.Loop() {
		got, _ := s.take(11)
		s.give(got)
	}
}
