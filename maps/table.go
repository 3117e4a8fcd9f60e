package maps

import (
	"errors"
	"fmt"
	"iter"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// ErrFull is returned by Put when the map has no room for another entry.
var ErrFull = errors.New("map is full")

// Entry is one key with its value.
type Entry[K comparable, V any] struct {
	Key   K
	Value V
}

// Table is a BPF map seen through its Go types. [Map] is the kernel's,
// [FakeTable] is a test's.
type Table[K comparable, V any] interface {
	// Name returns the name of the map, which is also that of its pin.
	Name() string
	// Capacity returns how many entries the map can hold. Zero is no limit.
	Capacity() int
	// Put creates or replaces the entry at k. It returns an error wrapping
	// ErrFull if the map has no room.
	Put(k K, v V) error
	// Delete removes the entry at k. Removing an absent entry is not an error.
	Delete(k K) error
	// Lookup returns the value at k, and whether there is one.
	Lookup(k K) (V, bool, error)
	// All yields every entry, in no order. It stops after the first error.
	All() iter.Seq2[Entry[K, V], error]
}

// Collect returns all entries of a table or of counts.
func Collect[K comparable, V any](all iter.Seq2[Entry[K, V], error]) (map[K]V, error) {
	entries := make(map[K]V)
	for e, err := range all {
		if err != nil {
			return nil, err
		}
		entries[e.Key] = e.Value
	}

	return entries, nil
}

// Map is a Table in the kernel.
type Map[K comparable, V any] struct {
	name string
	m    *ebpf.Map
}

// Name implements [Table].
func (t *Map[K, V]) Name() string { return t.name }

// Capacity implements [Table].
func (t *Map[K, V]) Capacity() int { return int(t.m.MaxEntries()) }

// Put implements [Table].
func (t *Map[K, V]) Put(k K, v V) error {
	err := t.m.Put(&k, &v)
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("map %s, %d entries: %w", t.name, t.m.MaxEntries(), ErrFull)
	}
	if err != nil {
		return fmt.Errorf("map %s: put: %w", t.name, err)
	}

	return nil
}

// Delete implements [Table].
func (t *Map[K, V]) Delete(k K) error {
	_, err := t.Remove(k)

	return err
}

// Remove is Delete, and reports whether there was an entry at k.
func (t *Map[K, V]) Remove(k K) (bool, error) {
	err := t.m.Delete(&k)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("map %s: delete: %w", t.name, err)
	}

	return true, nil
}

// Lookup implements [Table].
func (t *Map[K, V]) Lookup(k K) (V, bool, error) {
	var v V
	err := t.m.Lookup(&k, &v)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("map %s: lookup: %w", t.name, err)
	}

	return v, true, nil
}

// batch is the number of entries that one system call reads.
const batch = 4096

// All implements [Table]. Entries that are added or deleted meanwhile may be missed or yielded twice.
func (t *Map[K, V]) All() iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		var cursor ebpf.MapBatchCursor
		keys, values := make([]K, batch), make([]V, batch)
		for {
			n, err := t.m.BatchLookup(&cursor, keys, values, nil)
			if errors.Is(err, ebpf.ErrNotSupported) {
				t.each(yield) // Linux before 5.16 has no batches for tries
				return
			}
			last := errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !last {
				yield(Entry[K, V]{}, fmt.Errorf("map %s: read: %w", t.name, err))
				return
			}
			for i := range n {
				if !yield(Entry[K, V]{keys[i], values[i]}, nil) {
					return
				}
			}
			if last {
				return
			}
		}
	}
}

// Count returns how many entries there are, by reading all.
func (t *Map[K, V]) Count() (int, error) {
	n := 0
	for _, err := range t.All() {
		if err != nil {
			return 0, err
		}
		n++
	}

	return n, nil
}

func (t *Map[K, V]) fill() (Fill, error) {
	n, err := t.Count()

	return Fill{Name: t.name, Entries: n, Capacity: t.Capacity()}, err
}

// each yields all entries, with a system call for each.
func (t *Map[K, V]) each(yield func(Entry[K, V], error) bool) {
	var e Entry[K, V]
	it := t.m.Iterate()
	for it.Next(&e.Key, &e.Value) {
		if !yield(e, nil) {
			return
		}
	}
	if err := it.Err(); err != nil {
		yield(Entry[K, V]{}, fmt.Errorf("map %s: iterate: %w", t.name, err))
	}
}
