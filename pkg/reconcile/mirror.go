package reconcile

import (
	"errors"
	"fmt"
	"iter"
	stdmaps "maps"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Writes counts the writes to a map.
type Writes struct {
	Puts    uint64
	Deletes uint64
}

// room records whether a map was full.
type room struct {
	refused bool // since the Service that is at work began
	freed   int  // entries that were freed since the map was full last, and not used again
}

func (r *room) note(err error) error {
	if errors.Is(err, maps.ErrFull) {
		r.refused, r.freed = true, 0
	}

	return err
}

// use records that an entry is used.
func (r *room) use() { r.freed = max(r.freed-1, 0) }

// managed is one of the maps, as far as all are alike.
type managed interface {
	Name() string
	counters() (Writes, Fill)
	// compareWritten finds the differences between the map and what was written to it.
	compareWritten(c *Comparison)
}

// table is a hash map whose writes are counted.
type table[K, V comparable] struct {
	maps.Table[K, V]
	*budget
	room
	writes  Writes
	used    int
	reserve error // see admit; nil: it was not returned yet
	// want yields all that was written, has reports whether an entry is as it was, and text formats a key and a value. Writes
	// may come between two entries that want yields.
	want iter.Seq2[K, V]
	has  func(K, V) bool
	text func(K, V) (string, string)
	// changed are the keys that were written since a comparison of the map began; nil: none is being made.
	changed map[K]struct{}
}

func (t *table[K, V]) counters() (Writes, Fill) {
	return t.writes, Fill{Used: t.used, Capacity: t.Capacity()}
}

// reserved is the part of a map, one in so many, that entries which a Service can have in masses leave to all others: those
// of external addresses, and those of Services with many source ranges.
const reserved = 4

// Whose the last part of a map is, see admit.
const (
	ofClusterIPs = "ClusterIPs, node ports and the node's addresses"
	ofFewRanges  = "Services with few source ranges"
)

// admit returns why there is no room for an entry that leaves the last part of the map to others, or nil. The error wraps
// [maps.ErrFull].
func (t *table[K, V]) admit(others string) error {
	n := t.Capacity()
	if n == 0 || t.used < n-n/reserved {
		return nil
	}
	if t.reserve == nil {
		t.reserve = fmt.Errorf("map %s, %d entries, of which the last quarter is for %s: %w", t.Name(), n, others, maps.ErrFull)
	}

	return t.note(t.reserve)
}

// put writes an entry; there reports whether the map has the key already.
func (t *table[K, V]) put(k K, v V, there bool) error {
	t.spend(costOperation)
	t.change(k)
	if err := t.Table.Put(k, v); err != nil {
		return t.note(err)
	}
	t.writes.Puts++
	if !there {
		t.used++
		t.use()
	}

	return nil
}

// remove deletes an entry; ours reports whether it was written, and not found by Drift only.
func (t *table[K, V]) remove(k K, ours bool) error {
	t.spend(costOperation)
	t.change(k)
	if err := t.Table.Delete(k); err != nil {
		return err
	}
	t.writes.Deletes++
	if ours {
		t.used--
		t.freed++
	}

	return nil
}

func (t *table[K, V]) change(k K) {
	if t.changed != nil {
		t.changed[k] = struct{}{}
	}
}

// mirror is a hash map with a copy of all that was written to it.
type mirror[K, V comparable] struct {
	table[K, V]
	have map[K]V
	// onAdd is called before a new key is written, onRemove after it was deleted or could not be
	// written; both may be nil.
	onAdd, onRemove func(K)
}

func newMirror[K, V comparable](t maps.Table[K, V], m *budget, text func(K, V) (string, string)) mirror[K, V] {
	have := make(map[K]V)
	has := func(k K, v V) bool {
		written, there := have[k]

		return there && written == v
	}

	return mirror[K, V]{table: table[K, V]{Table: t, budget: m, want: stdmaps.All(have), has: has, text: text}, have: have}
}

func (m *mirror[K, V]) adopt() error {
	for e, err := range m.All() {
		if err != nil {
			return err
		}
		if m.onAdd != nil {
			m.onAdd(e.Key)
		}
		m.have[e.Key] = e.Value
		m.used++
	}

	return nil
}

// set writes v at k, unless it is there.
func (m *mirror[K, V]) set(k K, v V) error {
	have, there := m.have[k]
	if there && have == v {
		return nil
	}
	if !there && m.onAdd != nil {
		m.onAdd(k)
	}
	if err := m.put(k, v, there); err != nil {
		if !there && m.onRemove != nil {
			m.onRemove(k)
		}

		return err
	}
	m.have[k] = v

	return nil
}

// unset deletes k, if it is there.
func (m *mirror[K, V]) unset(k K) error {
	if _, there := m.have[k]; !there {
		return nil
	}
	if err := m.remove(k, true); err != nil {
		return err
	}
	delete(m.have, k)
	if m.onRemove != nil {
		m.onRemove(k)
	}

	return nil
}

// derived is a mirror of a map whose entries are computed by want. An entry is only written when it
// changes: while one is being replaced, a program may find none.
type derived[K, V comparable] struct {
	mirror[K, V]
	want  func(K) (V, bool)
	order func(a, b K) int // of writes; nil: any
	stale map[K]struct{}   // keys where the map differs from want
	retry backoff
}

func newDerived[K, V comparable](m mirror[K, V], want func(K) (V, bool)) derived[K, V] {
	return derived[K, V]{mirror: m, want: want, stale: make(map[K]struct{})}
}

// compare updates stale at k, after the map or want has changed.
func (d *derived[K, V]) compare(k K) {
	have, there := d.have[k]
	if want, wanted := d.want(k); want == have && wanted == there {
		delete(d.stale, k)
	} else {
		d.stale[k] = struct{}{}
		d.retry.at = time.Time{}
	}
}

// due returns when apply has something to do, and false if it has nothing.
func (d *derived[K, V]) due() (time.Time, bool) { return d.retry.at, len(d.stale) > 0 }

// apply writes what want returns for stale keys, with half of the budget that is left in this
// Apply: first new and changed entries, then deletions. If the map was full and deletions made
// room, it writes again.
func (d *derived[K, V]) apply(now time.Time) error {
	if len(d.stale) == 0 || !d.retry.isOver(now) || d.spent() {
		return nil
	}
	var write, remove []K
	for k := range d.stale {
		if len(write)+len(remove) > d.left/costOperation/2 {
			break
		}
		if _, wanted := d.want(k); wanted {
			write = append(write, k)
		} else {
			remove = append(remove, k)
		}
	}
	put := func(k K) error {
		v, _ := d.want(k)

		return d.set(k, v)
	}
	err := d.each(write, put)
	failed := d.each(remove, d.unset)
	if errors.Is(err, maps.ErrFull) && d.freed > 0 {
		err = d.each(write, put)
	}
	err = errors.Join(err, failed)
	d.retry.update(err, now)

	return err
}

// each calls do for every key, and compares it then.
func (d *derived[K, V]) each(keys []K, do func(K) error) error {
	if d.order != nil {
		slices.SortFunc(keys, d.order)
	}
	var failed []error
	for _, k := range keys {
		failed = append(failed, do(k))
		d.compare(k)
	}

	return errors.Join(failed...)
}

// whole is a derived map that refers to no other one: its desired entries are set all at once, and
// until then are those that were adopted.
type whole[K, V comparable] struct {
	derived[K, V]
	all map[K]V
}

func newWhole[K, V comparable](m mirror[K, V]) *whole[K, V] {
	w := &whole[K, V]{}
	w.derived = newDerived(m, func(k K) (V, bool) {
		v, wanted := w.all[k]

		return v, wanted
	})

	return w
}

func (w *whole[K, V]) replace(all map[K]V) {
	w.all = all
	for k := range w.have {
		w.compare(k)
	}
	for k := range all {
		w.compare(k)
	}
}

// array is one of the arrays, with a copy of all that was written to it.
type array[V comparable] struct {
	*maps.Array[V]
	*budget
	*room  // of those who allocate its places
	writes Writes
	have   []V  // by place
	used   *int // number of places in use
	cost   int  // of a write
	text   func(place uint32, v V) (string, string)
}

func (a *array[V]) counters() (Writes, Fill) {
	return a.writes, Fill{Used: *a.used, Capacity: a.Limit()}
}

// adopt copies the content of the array.
func (a *array[V]) adopt() {
	for i, v := range a.All() {
		a.extend(i)
		a.have[i] = v
	}
}

// extend makes the copy include a place. It allocates for the whole array, so that a million values
// are not copied each time that it grows.
func (a *array[V]) extend(place uint32) {
	if int(place) >= cap(a.have) {
		a.have = append(make([]V, 0, max(a.Len(), int(place)+1)), a.have...)
	}
	a.have = a.have[:max(len(a.have), int(place)+1)]
}

// at returns what was written to a place.
func (a *array[V]) at(place uint32) V {
	if int(place) < len(a.have) {
		return a.have[place]
	}
	var none V

	return none
}

// put writes to a place, unless the value is there.
func (a *array[V]) put(place uint32, v V) error {
	if a.at(place) == v {
		return nil
	}
	a.spend(a.cost)

	return a.store(place, v)
}

func (a *array[V]) store(place uint32, v V) error {
	if err := a.Put(place, v); err != nil {
		return a.note(err)
	}
	a.extend(place)
	a.have[place] = v
	a.writes.Puts++

	return nil
}

// clear writes the value of a free place.
func (a *array[V]) clear(place uint32, cleared V) error {
	a.spend(costOperation)
	if err := a.Put(place, cleared); err != nil {
		return err
	}
	a.extend(place)
	a.have[place] = cleared
	a.writes.Deletes++

	return nil
}
