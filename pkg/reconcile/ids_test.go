package reconcile

import "testing"

func TestIDs(t *testing.T) {
	s := newIDs()
	if a, b := s.take(), s.take(); a != 1 || b != 2 {
		t.Errorf("took %d and %d, want 1 and 2", a, b)
	}
	s.free(2)
	if id := s.take(); id != 3 {
		t.Errorf("took %d after 2 was freed, want 3", id)
	}
	s.adopt(1<<32 - 2)
	s.adopt(5)
	for _, want := range []uint32{1<<32 - 1, 2, 4, 6} { // wraps, and skips 0, 1, 3 and 5
		if id := s.take(); id != want {
			t.Errorf("took %d, want %d", id, want)
		}
	}
	s.adopt(1<<32 - 1)
	if id := s.take(); id != 7 {
		t.Errorf("took %d after the last one was adopted, want 7", id)
	}
}
