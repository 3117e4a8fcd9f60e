package reconcile

import (
	"cmp"
	"slices"
)

// span is a run of slots.
type span struct {
	base, count uint32
}

func (s span) end() uint32 { return s.base + s.count }

// spans says which slots are free: first fit, neighbours merged. Slot 0 is
// never given away, so that base 0 means none.
type spans struct {
	holes []span // ascending, none touches the next
	used  int
}

// newSpans returns n slots, all free but slot 0.
func newSpans(n int) spans {
	if n < 2 {
		return spans{}
	}

	return spans{holes: []span{{base: 1, count: uint32(n - 1)}}}
}

// take returns count slots in a row that were free, or false if there are not
// that many in one place. Count is not zero.
func (s *spans) take(count int) (span, bool) {
	for i := range s.holes {
		if hole := &s.holes[i]; int(hole.count) >= count {
			taken := span{hole.base, uint32(count)}
			s.carve(i, taken)

			return taken, true
		}
	}

	return span{}, false
}

// mark takes these very slots, or returns false if they are not all free.
func (s *spans) mark(want span) bool {
	i, ok := slices.BinarySearchFunc(s.holes, want.base, func(hole span, base uint32) int {
		return cmp.Compare(hole.base, base)
	})
	if !ok {
		i--
	}
	if want.count == 0 || i < 0 || want.base-s.holes[i].base > s.holes[i].count ||
		s.holes[i].end()-want.base < want.count {
		return false
	}
	s.carve(i, want)

	return true
}

// carve takes a part out of hole i.
func (s *spans) carve(i int, part span) {
	hole := s.holes[i]
	before := span{hole.base, part.base - hole.base}
	after := span{part.end(), hole.end() - part.end()}
	var left []span
	for _, rest := range []span{before, after} {
		if rest.count > 0 {
			left = append(left, rest)
		}
	}
	s.holes = slices.Replace(s.holes, i, i+1, left...)
	s.used += int(part.count)
}

// free gives slots back that were taken or marked.
func (s *spans) free(back span) {
	s.used -= int(back.count)
	i, _ := slices.BinarySearchFunc(s.holes, back.base, func(hole span, base uint32) int {
		return cmp.Compare(hole.base, base)
	})
	from, to := i, i
	if i > 0 && s.holes[i-1].end() == back.base {
		from--
		back = span{s.holes[from].base, s.holes[from].count + back.count}
	}
	if i < len(s.holes) && back.end() == s.holes[i].base {
		to++
		back.count += s.holes[i].count
	}
	s.holes = slices.Replace(s.holes, from, to, back)
}
