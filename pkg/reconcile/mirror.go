package reconcile

import (
	"errors"
	"fmt"
	"iter"
	stdmaps "maps"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// meter counts down what an Apply may still do, in units of which a map operation takes
// costOperation: some 2 µs.
type meter struct{ left int }

const (
	costOperation = 64 // a system call
	costClaim     = 48 // a claim to a frontend that is entered or withdrawn
	costLook      = 8  // a look at something that may be as it should be
	costSlot      = 1  // a store in memory
)

func (m *meter) spend(units int) { m.left -= units }

func (m *meter) spent() bool { return m.left <= 0 }

// Writes counts what was written to a map.
type Writes struct {
	Puts    uint64
	Deletes uint64
}

// room remembers that a map was full, and that something of it was freed since.
type room struct{ lacks, freed bool }

func (r *room) note(err error) error {
	if errors.Is(err, maps.ErrFull) {
		r.lacks, r.freed = true, false
	}

	return err
}

func (r *room) full() *room { return r }

// managed is one of the maps, as far as all are alike.
type managed interface {
	Name() string
	counters() (Writes, Fill)
	full() *room
	// differ adds where the map does not say what was written to it.
	differ(c *comparison)
}

// table is a hash map in which every write is counted.
type table[K, V comparable] struct {
	maps.Table[K, V]
	*meter
	room
	writes Writes
	used   int
	// want yields what was written, and text returns a key and a value as people read them.
	want iter.Seq2[K, V]
	text func(K, V) (string, string)
}

func (t *table[K, V]) counters() (Writes, Fill) {
	fill := Fill{Used: t.used}
	if sized, ok := t.Table.(interface{ Capacity() int }); ok {
		fill.Capacity = sized.Capacity()
	}

	return t.writes, fill
}

// put writes an entry, which the map has already or not.
func (t *table[K, V]) put(k K, v V, there bool) error {
	t.spend(costOperation)
	if err := t.Table.Put(k, v); err != nil {
		return t.note(err)
	}
	t.writes.Puts++
	if !there {
		t.used++
	}

	return nil
}

// remove deletes an entry, which the map has or should not have.
func (t *table[K, V]) remove(k K, ours bool) error {
	t.spend(costOperation)
	if err := t.Table.Delete(k); err != nil {
		return err
	}
	t.writes.Deletes++
	if ours {
		t.used--
		t.freed = true
	}

	return nil
}

// mirror is a hash map with all that was written to it.
type mirror[K, V comparable] struct {
	table[K, V]
	have map[K]V
	// enters is called before a key is in the map that was not, leaves when it is there no
	// more, or still not; nil: neither.
	enters, leaves func(K)
}

func newMirror[K, V comparable](t maps.Table[K, V], m *meter, text func(K, V) (string, string)) mirror[K, V] {
	have := make(map[K]V)

	return mirror[K, V]{table: table[K, V]{Table: t, meter: m, want: stdmaps.All(have), text: text}, have: have}
}

func (m *mirror[K, V]) adopt() error {
	for e, err := range m.All() {
		if err != nil {
			return err
		}
		if m.enters != nil {
			m.enters(e.Key)
		}
		m.have[e.Key] = e.Value
		m.used++
	}

	return nil
}

// set makes the map have v at k.
func (m *mirror[K, V]) set(k K, v V) error {
	have, there := m.have[k]
	if there && have == v {
		return nil
	}
	if !there && m.enters != nil {
		m.enters(k)
	}
	if err := m.put(k, v, there); err != nil {
		if !there && m.leaves != nil {
			m.leaves(k)
		}

		return err
	}
	m.have[k] = v

	return nil
}

// unset makes the map have nothing at k.
func (m *mirror[K, V]) unset(k K) error {
	if _, there := m.have[k]; !there {
		return nil
	}
	if err := m.remove(k, true); err != nil {
		return err
	}
	delete(m.have, k)
	if m.leaves != nil {
		m.leaves(k)
	}

	return nil
}

// derived is a mirror of a map of which each entry follows from something else. It is only
// written when it changes: a program that looks while one is being replaced may find none.
type derived[K, V comparable] struct {
	mirror[K, V]
	want  func(K) (V, bool)
	order func(a, b K) int // in which keys are written; nil: any
	stale map[K]struct{}   // of which the map does not say what is wanted
	retry backoff
}

func newDerived[K, V comparable](m mirror[K, V], want func(K) (V, bool)) derived[K, V] {
	return derived[K, V]{mirror: m, want: want, stale: make(map[K]struct{})}
}

// compare notes whether the map says what is wanted at k, after either has changed.
func (d *derived[K, V]) compare(k K) {
	have, there := d.have[k]
	if want, wanted := d.want(k); want == have && wanted == there {
		delete(d.stale, k)
	} else {
		d.stale[k] = struct{}{}
		d.retry.at = 0
	}
}

// due returns when apply has something to do, or never.
func (d *derived[K, V]) due() instant {
	if len(d.stale) == 0 {
		return never
	}

	return d.retry.at
}

// apply makes the map say what is wanted, as far as half of the operations that are left in
// this Apply allow: it writes what is new or different, then deletes what is to go, and if
// there was no room before, writes again.
func (d *derived[K, V]) apply(now instant) error {
	if d.due() > now || d.spent() {
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
	if err != nil && d.lacks && d.freed {
		err = d.each(write, put)
	}
	err = errors.Join(err, failed)
	d.retry.after(err, now)

	return err
}

// each does do for every key, and notes what came of it.
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

// whole is a derived map that refers to no other one: all that it should have is set at once.
// Until then it keeps what was adopted.
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

// array is one of the arrays, with all that was written to it.
type array[V comparable] struct {
	*maps.Array[V]
	*meter
	room
	writes Writes
	have   []V  // by place
	used   *int // how many of the places
	text   func(place uint32, v V) (string, string)
}

func (a *array[V]) counters() (Writes, Fill) {
	return a.writes, Fill{Used: *a.used, Capacity: a.Limit()}
}

// adopt takes over what the array has.
func (a *array[V]) adopt() {
	for i, v := range a.All() {
		a.extend(i)
		a.have[i] = v
	}
}

// extend has the values up to a place in memory. There is room for all that can be written
// now: a million of them are not moved every time that there are more.
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

// put writes to a place, if it has something else.
func (a *array[V]) put(place uint32, v V) error {
	if a.at(place) == v {
		return nil
	}
	a.spend(costOperation)

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

// clear makes a place empty, of which only cleared may be left.
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

// putAll writes values to places in a row.
func putAll(a *array[uint32], base uint32, values []uint32) error {
	a.spend(len(values) * costSlot)
	for i, v := range values {
		if place := base + uint32(i); a.at(place) != v {
			if err := a.store(place, v); err != nil {
				return fmt.Errorf("place %d: %w", place, err)
			}
		}
	}

	return nil
}
