package reconcile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// places allocates the places of an array. Place 0 is never allocated.
type places struct {
	room
	what  string     // the map
	limit func() int // how many places there can be
	next  uint32     // from here on no place was ever allocated
	free  []uint32   // given back, and some that are not free any more, see void; the first is allocated next
	used  int

	// void counts the entries of free that are none any more, because the place was reclaimed: its first ones. To remove
	// each at once would take too long when many backends come back. voids is the sum.
	void  map[uint32]int
	voids int

	// generations are those of the places, where ids are made of them; see id.
	generations []uint8
	// spare is the number of free places that are kept back while there are new ones, so that an
	// id is not reused soon.
	spare int
	// busy reports whether a free place cannot be allocated yet; nil: never.
	busy func(place uint32) bool
}

// sparePlaces is the spare of places with generations: an id is reused only after
// 256 * sparePlaces other allocations at least.
const sparePlaces = 1024

// maxBusy is how many busy places take skips.
const maxBusy = 64

// take allocates a place. The error wraps [maps.ErrFull] if none is free.
func (p *places) take() (uint32, error) {
	grows := int(p.next) < min(p.limit(), 1<<maps.IndexBits)
	if free := len(p.free) - p.voids; free > p.spare || !grows {
		for range min(free, maxBusy) {
			place := p.first()
			if p.busy == nil || !p.busy(place) {
				p.used++
				p.use()

				return place, nil
			}
			p.free = append(p.free, place)
		}
	}
	if !grows {
		return 0, p.note(fmt.Errorf("map %s, %d places: %w", p.what, p.limit(), maps.ErrFull))
	}
	p.next++
	p.used++
	p.use()

	return p.next - 1, nil
}

// first removes the first free place from the list. There must be one.
func (p *places) first() uint32 {
	for {
		place := p.free[0]
		p.free = p.free[1:]
		if !p.isVoid(place) {
			return place
		}
	}
}

// isVoid reports whether the next entry of free for a place is void, and counts it as removed then.
func (p *places) isVoid(place uint32) bool {
	if p.void[place] == 0 {
		return false
	}
	p.voids--
	if p.void[place]--; p.void[place] == 0 {
		delete(p.void, place)
	}

	return true
}

// untake frees a place to which nothing was written.
func (p *places) untake(place uint32) {
	p.free = slices.Insert(p.free, 0, place)
	p.used--
	p.freed++
}

// give frees places. Their next ids are of the next generation.
func (p *places) give(given ...uint32) {
	p.free = append(p.free, given...)
	p.used -= len(given)
	p.freed += len(given)
	if p.generations == nil {
		return
	}
	for _, place := range given {
		p.setGeneration(place, p.generation(place)+1)
	}
}

// reclaim allocates the free place of an id again, for the same id.
func (p *places) reclaim(id uint32) {
	place := maps.Index(id)
	if p.void == nil {
		p.void = make(map[uint32]int)
	}
	p.void[place]++
	if p.voids++; p.voids > len(p.free)/2 {
		p.free = slices.DeleteFunc(p.free, p.isVoid) // so that the list is not longer than twice the free places
	}
	p.used++
	p.use()
	p.setGeneration(place, uint8(maps.Generation(id)))
}

// adopt allocates all places below end, and returns those that are not in use: the caller gives
// them back when programs cannot read them any more.
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

// id returns the id for the current allocation of a place.
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

// spans allocates runs of slots: first fit, free neighbours merged. Slot 0 is never allocated, so
// that base 0 means none.
type spans struct {
	room
	holes []span     // ascending, none touches the next
	limit func() int // how many slots there can be
	used  int
}

// next returns the slot from which on all are free.
func (s *spans) next() uint32 { return s.holes[len(s.holes)-1].base }

func newSpans(limit func() int) spans {
	return spans{holes: []span{{base: 1, count: 1<<32 - 1}}, limit: limit}
}

// take allocates count consecutive slots. The error wraps [maps.ErrFull] if no hole is large
// enough.
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

	return span{}, s.note(fmt.Errorf("map %s, %d of %d in use, none has room for %d: %w",
		maps.NameSlots, s.used, s.limit(), count, maps.ErrFull))
}

// mark allocates exactly these slots. It returns false if some of them are not free.
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

// carve removes a part of hole i.
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

// give frees slots.
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

// below allocates all free slots below end and returns them.
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
