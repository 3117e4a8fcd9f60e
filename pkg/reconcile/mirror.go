package reconcile

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/maps"
)

// meter counts down the map operations that an Apply may still do.
type meter struct{ left int }

func (m *meter) spent() bool { return m.left <= 0 }

// Writes counts what was written to a map.
type Writes struct {
	Puts    uint64
	Deletes uint64
}

// room remembers that a map was full, and that something of it was freed since.
type room struct{ full, freed bool }

func (r *room) note(err error) error {
	if errors.Is(err, maps.ErrFull) {
		r.full, r.freed = true, false
	}

	return err
}

// table is a hash map in which every write is counted.
type table[K, V comparable] struct {
	maps.Table[K, V]
	*meter
	room
	writes   Writes
	used     int
	capacity int
}

func newTable[K, V comparable](t maps.Table[K, V], m *meter) table[K, V] {
	counted := table[K, V]{Table: t, meter: m}
	if sized, ok := t.(interface{ Capacity() int }); ok {
		counted.capacity = sized.Capacity()
	}

	return counted
}

// put writes an entry, which the map has already or not.
func (t *table[K, V]) put(k K, v V, there bool) error {
	t.left--
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
	t.left--
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
}

func newMirror[K, V comparable](t maps.Table[K, V], m *meter) mirror[K, V] {
	return mirror[K, V]{table: newTable(t, m), have: make(map[K]V)}
}

func (m *mirror[K, V]) adopt() error {
	for e, err := range m.All() {
		if err != nil {
			return err
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
	if err := m.put(k, v, there); err != nil {
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

	return nil
}

// whole is a mirror of a map that refers to no other one: all that it should have is set
// at once. Until then it keeps what was adopted.
type whole[K, V comparable] struct {
	mirror[K, V]
	want  map[K]V
	dirty bool
	retry backoff
}

func newWhole[K, V comparable](t maps.Table[K, V], m *meter) whole[K, V] {
	return whole[K, V]{mirror: newMirror(t, m)}
}

func (w *whole[K, V]) replace(want map[K]V) {
	w.want, w.dirty, w.retry.at = want, true, 0
}

// due returns when apply has something to do, or never.
func (w *whole[K, V]) due() instant {
	if !w.dirty {
		return never
	}

	return w.retry.at
}

// apply adds and changes what is wanted, then removes the rest.
func (w *whole[K, V]) apply(now instant) error {
	if w.due() > now {
		return nil
	}
	var failed []error
	for k, v := range w.want {
		failed = append(failed, w.set(k, v))
	}
	for k := range w.have {
		if _, wanted := w.want[k]; !wanted {
			failed = append(failed, w.unset(k))
		}
	}
	err := errors.Join(failed...)
	w.dirty = err != nil
	w.retry.after(err, now)

	return err
}

// array is one of the arrays, with all that was written to it.
type array[V comparable] struct {
	*maps.Array[V]
	*meter
	room
	writes Writes
	have   []V // by place
	text   func(place uint32, v V) (string, string)
}

func newArray[V comparable](a *maps.Array[V], m *meter, text func(uint32, V) (string, string)) array[V] {
	return array[V]{Array: a, meter: m, text: text}
}

// adopt takes over what the array has. It returns the first place from which on there is
// nothing.
func (a *array[V]) adopt() uint32 {
	for i, v := range a.All() {
		a.extend(i)
		a.have[i] = v
	}

	return max(uint32(len(a.have)), 1)
}

func (a *array[V]) extend(place uint32) {
	for int(place) >= len(a.have) {
		var none V
		a.have = append(a.have, none)
	}
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
	a.left--

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
	a.left--
	if err := a.Put(place, cleared); err != nil {
		return err
	}
	a.have[place] = cleared
	a.writes.Deletes++

	return nil
}

// slotsPerOperation is how many slots count as one map operation: to write one is a store
// in memory, and no system call.
const slotsPerOperation = 64

// putAll writes values to places in a row.
func putAll(a *array[uint32], base uint32, values []uint32) error {
	a.left -= 1 + len(values)/slotsPerOperation
	for i, v := range values {
		if place := base + uint32(i); a.at(place) != v {
			if err := a.store(place, v); err != nil {
				return fmt.Errorf("place %d: %w", place, err)
			}
		}
	}

	return nil
}
