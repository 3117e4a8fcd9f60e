package reconcile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// places says which places of an array are free. Place 0 is never given away.
type places struct {
	what  string     // the map
	limit func() int // how many places there can be
	next  uint32     // no place from here on was ever given away
	free  []uint32   // that were given back: the first is the next to be given away again
	used  int

	// generations of the places, where what they are given to has an id that others
	// remember; see id.
	generations []uint8
	// spare is how many free places wait before the first of them is given away again,
	// as long as there are new ones: so that it takes long until an id comes again.
	spare int
	// busy reports whether a free place cannot be given away yet; nil: all can.
	busy func(place uint32) bool
}

// sparePlaces is the spare of places with generations: an id comes again after it was
// given back 256 * sparePlaces times at least.
const sparePlaces = 1024

// maxBusy is how many busy places take passes over.
const maxBusy = 64

// take returns a free place. The error wraps [maps.ErrFull] if there is none.
func (p *places) take() (uint32, error) {
	grows := int(p.next) < min(p.limit(), 1<<maps.IndexBits)
	if len(p.free) > p.spare || !grows {
		for range min(len(p.free), maxBusy) {
			place := p.free[0]
			p.free = p.free[1:]
			if p.busy == nil || !p.busy(place) {
				p.used++

				return place, nil
			}
			p.free = append(p.free, place)
		}
	}
	if !grows {
		return 0, fmt.Errorf("map %s, %d places: %w", p.what, p.limit(), maps.ErrFull)
	}
	p.next++
	p.used++

	return p.next - 1, nil
}

// untake gives a place back to which nothing was written.
func (p *places) untake(place uint32) {
	p.free = slices.Insert(p.free, 0, place)
	p.used--
}

// give gives places back. Their next ids are of another generation.
func (p *places) give(given ...uint32) {
	p.free = append(p.free, given...)
	p.used -= len(given)
	if p.generations == nil {
		return
	}
	for _, place := range given {
		p.setGeneration(place, p.generation(place)+1)
	}
}

// adopt takes over the places below end, of which some are in use. It returns the others,
// which count as taken until they are given back.
func (p *places) adopt(end int, inUse func(place uint32) bool) []uint32 {
	p.next = max(uint32(end), 1)
	p.used = int(p.next) - 1
	var unused []uint32
	for place := uint32(1); place < p.next; place++ {
		if !inUse(place) {
			unused = append(unused, place)
		}
	}

	return unused
}

// id returns the id of what a place is given to.
func (p *places) id(place uint32) uint32 { return maps.ID(place, uint32(p.generation(place))) }

func (p *places) generation(place uint32) uint8 {
	if int(place) < len(p.generations) {
		return p.generations[place]
	}

	return 0
}

func (p *places) setGeneration(place uint32, generation uint8) {
	for int(place) >= len(p.generations) {
		p.generations = append(p.generations, 0)
	}
	p.generations[place] = generation
}

// span is a run of slots.
type span struct {
	base, count uint32
}

func (s span) end() uint64 { return uint64(s.base) + uint64(s.count) }

// spans says which slots are free: first fit, neighbours merged. Slot 0 is never given
// away, so that base 0 means none.
type spans struct {
	holes []span     // ascending, none touches the next
	limit func() int // how many slots there can be
	used  int
}

// next returns the slot from which on all are free.
func (s *spans) next() uint32 { return s.holes[len(s.holes)-1].base }

func newSpans(limit func() int) spans {
	return spans{holes: []span{{base: 1, count: 1<<32 - 1}}, limit: limit}
}

// take returns count slots in a row that were free. The error wraps [maps.ErrFull] if there
// are not that many in one place.
func (s *spans) take(count int) (span, error) {
	if count == 0 {
		return span{}, nil
	}
	for i := range s.holes {
		if hole := &s.holes[i]; int(hole.count) >= count {
			taken := span{hole.base, uint32(count)}
			if taken.end() > uint64(s.limit()) {
				break
			}
			s.carve(i, taken)

			return taken, nil
		}
	}

	return span{}, fmt.Errorf("map %s, %d of %d in use, none has room for %d: %w",
		maps.NameSlots, s.used, s.limit(), count, maps.ErrFull)
}

// mark takes these very slots, or returns false if they are not all free.
func (s *spans) mark(want span) bool {
	if want.count == 0 {
		return true
	}
	i, ok := slices.BinarySearchFunc(s.holes, want.base, func(hole span, base uint32) int {
		return cmp.Compare(hole.base, base)
	})
	if !ok {
		i--
	}
	if i < 0 || want.end() > s.holes[i].end() {
		return false
	}
	s.carve(i, want)

	return true
}

// carve takes a part out of hole i.
func (s *spans) carve(i int, part span) {
	hole := s.holes[i]
	before := span{hole.base, part.base - hole.base}
	after := span{uint32(part.end()), uint32(hole.end() - part.end())}
	var left []span
	for _, rest := range []span{before, after} {
		if rest.count > 0 {
			left = append(left, rest)
		}
	}
	s.holes = slices.Replace(s.holes, i, i+1, left...)
	s.used += int(part.count)
}

// give gives slots back that were taken or marked.
func (s *spans) give(back span) {
	if back.count == 0 {
		return
	}
	s.used -= int(back.count)
	i, _ := slices.BinarySearchFunc(s.holes, back.base, func(hole span, base uint32) int {
		return cmp.Compare(hole.base, base)
	})
	from, to := i, i
	if i > 0 && s.holes[i-1].end() == uint64(back.base) {
		from--
		back = span{s.holes[from].base, s.holes[from].count + back.count}
	}
	if i < len(s.holes) && back.end() == uint64(s.holes[i].base) {
		to++
		back.count += s.holes[i].count
	}
	s.holes = slices.Replace(s.holes, from, to, back)
}

// below returns the free slots below an end, after taking them.
func (s *spans) below(end uint32) []span {
	var taken []span
	for len(s.holes) > 0 && s.holes[0].base < end {
		part := s.holes[0]
		part.count = uint32(min(part.end(), uint64(end)) - uint64(part.base))
		s.carve(0, part)
		taken = append(taken, part)
	}

	return taken
}
