package queue

import (
	"slices"
	"testing"
)

// Owners take turns, whatever one of them adds, and the elements of each stay in their order.
func TestTurns(t *testing.T) {
	var turns Turns[int]
	for n := range 4 {
		turns.Add("many", n)
	}
	turns.Add("few", 10)
	turns.Add("few", 11)
	turns.Add("one", 20)
	turns.Remove("many", 1)
	turns.Remove("one", 20)
	turns.Remove("one", 20)
	if turns.Has("one", 20) || !turns.Has("few", 11) || turns.Has("few", 2) || turns.Len() != 5 {
		t.Errorf("%d wait, or not those that were added", turns.Len())
	}
	var got []int
	next := func() {
		n, ok := turns.Next()
		if !ok {
			t.Fatal("none waits")
		}
		got = append(got, n)
	}
	next()
	turns.Add("one", 21)
	for turns.Len() > 0 {
		next()
	}
	if want := []int{0, 10, 2, 21, 11, 3}; !slices.Equal(got, want) {
		t.Errorf("in the order %v, want %v", got, want)
	}
	if _, ok := turns.Next(); ok {
		t.Error("one waits still")
	}
}
