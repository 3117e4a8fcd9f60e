package metrics

import (
	"cmp"
	"iter"
	stdmaps "maps"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// service is a Service that is in the maps.
type service struct {
	name     lb.ServiceName
	own      bool     // it has series of its own
	assigned bool     // own is decided
	ids      int      // how many service port ids it has
	first    uint32   // the lowest of them
	backends []uint32 // their ids
	// sums has what was counted for the ids that it has and had. It only grows: an id that
	// goes takes nothing away.
	sums counts
}

// index maps ids to Services. It is rebuilt only when the maps have changed, so that most
// scrapes read counts only.
type index struct {
	limit    int // of Services with series of their own
	services map[lb.ServiceName]*service
	sorted   []*service // by name
	// owners has a Service's ids as long as the Service exists, including those that it
	// no longer has: connections that began there continue, and are counted when they end.
	owners map[uint32]owner
	builds uint32     // how often it was rebuilt
	own    int        // Services with series of their own
	gone   []*service // found by the last rebuild
}

type owner struct {
	*service
	past bool // the id was released, and may belong to another Service when it is used again
}

func newIndex(limit int) index {
	return index{limit: limit, services: make(map[lb.ServiceName]*service), owners: make(map[uint32]owner)}
}

// rebuild reads the maps. Services that are gone stay in gone, with their ids, until the
// caller has added their counts to others and calls forget.
func (x *index) rebuild(t maps.Tables) error {
	x.builds++
	for _, svc := range x.services {
		svc.ids, svc.backends = 0, svc.backends[:0]
	}
	for e, err := range t.ServicePorts.All() {
		if err != nil {
			return err
		}
		x.observe(e.Key, &e.Value)
	}
	for _, b := range t.Backends.All() {
		if o, ok := x.owners[b.ServicePortId]; ok && b.Id != 0 {
			o.backends = append(o.backends, b.Id)
		}
	}
	x.findGone()
	x.assignSeries()
	x.sorted = slices.SortedFunc(stdmaps.Values(x.services), func(a, b *service) int {
		return cmp.Or(cmp.Compare(a.name.Namespace, b.name.Namespace), cmp.Compare(a.name.Name, b.name.Name))
	})

	return nil
}

// observe adds an id that the maps have, with the Service that it belongs to.
func (x *index) observe(id uint32, port *maps.ServicePort) {
	svc := x.owners[id].service
	if svc == nil || x.owners[id].past {
		name, ok := serviceNameOf(port)
		if !ok {
			return
		}
		if svc = x.services[name]; svc == nil {
			svc = &service{name: name}
			x.services[name] = svc
		}
	}
	if svc.ids == 0 || id < svc.first {
		svc.first = id
	}
	svc.ids++
	x.owners[id] = owner{service: svc}
}

// serviceNameOf returns the name of a Service; false for the agent's probe.
func serviceNameOf(port *maps.ServicePort) (lb.ServiceName, bool) {
	namespace, name, _ := port.Parts()

	// Long names are cut, perhaps in the middle of a character.
	return lb.ServiceName{Namespace: strings.ToValidUTF8(namespace, ""), Name: strings.ToValidUTF8(name, "")}, !port.IsProbe()
}

func (x *index) findGone() {
	for name, svc := range x.services {
		if svc.ids > 0 {
			continue
		}
		delete(x.services, name)
		x.gone = append(x.gone, svc)
		if svc.own {
			x.own--
		}
	}
}

// assignSeries gives new Services series of their own, up to the limit. It begins with low
// ids, which tend to be older, also those that an earlier agent assigned.
func (x *index) assignSeries() {
	var fresh []*service
	for _, svc := range x.services {
		if !svc.assigned {
			fresh = append(fresh, svc)
		}
	}
	slices.SortFunc(fresh, func(a, b *service) int { return cmp.Compare(a.first, b.first) })
	for _, svc := range fresh {
		svc.assigned = true
		if x.own < x.limit {
			svc.own = true
			x.own++
		}
	}
}

// forget drops the Services that are gone, and returns their ids.
func (x *index) forget() map[uint32]bool {
	ids := make(map[uint32]bool)
	if len(x.gone) == 0 {
		return ids
	}
	gone := make(map[*service]bool, len(x.gone))
	for _, svc := range x.gone {
		gone[svc] = true
	}
	for id, o := range x.owners {
		if gone[o.service] {
			ids[id] = true
			delete(x.owners, id)
		}
	}
	x.gone = nil

	return ids
}

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

// clear makes all counts zero. Those that there were are still listed.
func (t counts) clear() {
	for i := range t {
		t[i].n = 0
	}
}

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
