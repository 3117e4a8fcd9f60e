package metrics

import (
	"cmp"
	"iter"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// counts has a number for each outcome ([maps.StatKey]). It is a list because few outcomes
// ever occur.
type counts []count

type count struct {
	what uint32
	n    uint64
}

func (t *counts) add(what uint32, n uint64) {
	for i := range *t {
		if (*t)[i].what == what {
			(*t)[i].n += n

			return
		}
	}
	*t = append(*t, count{what, n})
}

func (t *counts) set(what uint32, n uint64) { t.add(what, n-t.get(what)) }

func (t *counts) addAll(other counts) {
	for _, c := range other {
		t.add(c.what, c.n)
	}
}

// get returns a count, zero if there is none.
func (t counts) get(what uint32) uint64 {
	for _, c := range t {
		if c.what == what {
			return c.n
		}
	}

	return 0
}

// connections returns how many flows have got a backend.
func (t counts) connections() uint64 {
	return t.get(uint32(maps.ReasonTranslated)) + t.get(uint32(maps.ReasonTranslatedUnremembered))
}

// failures yields how many flows got no backend, by reason, sorted by label.
func (t counts) failures() iter.Seq2[maps.Reason, uint64] {
	var failed counts
	for _, c := range t {
		if c.what < maps.StatBytesSent && !maps.Reason(c.what).Translated() {
			failed = append(failed, c)
		}
	}
	slices.SortFunc(failed, func(a, b count) int {
		return cmp.Compare(maps.Reason(a.what).Label(), maps.Reason(b.what).Label())
	})

	return func(yield func(maps.Reason, uint64) bool) {
		for _, c := range failed {
			if !yield(maps.Reason(c.what), c.n) {
				return
			}
		}
	}
}
