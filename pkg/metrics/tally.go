package metrics

import (
	"cmp"
	"iter"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// tally is what was counted, by what ([maps.StatKey]). Few things ever are.
type tally []counted

type counted struct {
	what uint32
	n    uint64
}

func (t *tally) add(what uint32, n uint64) {
	for i := range *t {
		if (*t)[i].what == what {
			(*t)[i].n += n

			return
		}
	}
	*t = append(*t, counted{what, n})
}

func (t *tally) set(what uint32, n uint64) { t.add(what, n-t.get(what)) }

func (t *tally) addAll(other tally) {
	for _, c := range other {
		t.add(c.what, c.n)
	}
}

// get returns a count, zero if there is none.
func (t tally) get(what uint32) uint64 {
	for _, c := range t {
		if c.what == what {
			return c.n
		}
	}

	return 0
}

// connections returns how many flows have got a backend.
func (t tally) connections() uint64 {
	return t.get(uint32(maps.ReasonTranslated)) + t.get(uint32(maps.ReasonTranslatedUnremembered))
}

// failures yields how many flows got none, by reason, sorted by the labels of
// these.
func (t tally) failures() iter.Seq2[maps.Reason, uint64] {
	var failed tally
	for _, c := range t {
		if c.what < maps.StatBytesSent && !translated(maps.Reason(c.what)) {
			failed = append(failed, c)
		}
	}
	slices.SortFunc(failed, func(a, b counted) int {
		return cmp.Compare(reasonLabel(maps.Reason(a.what)), reasonLabel(maps.Reason(b.what)))
	})

	return func(yield func(maps.Reason, uint64) bool) {
		for _, c := range failed {
			if !yield(maps.Reason(c.what), c.n) {
				return
			}
		}
	}
}
