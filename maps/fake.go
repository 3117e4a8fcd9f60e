package maps

import (
	"fmt"
	"iter"
)

// FakeTable is a [Table] in memory, for tests and dry runs.
type FakeTable[K comparable, V any] struct {
	TableName string
	Capacity  int // zero: no limit
	Entries   map[K]V

	// Fail, when set, is called before every write, which fails with its error.
	Fail func(table, operation string) error
	// Wrote, when set, is called after every successful write.
	Wrote func(table, operation string)
}

// Name implements [Table].
func (t *FakeTable[K, V]) Name() string { return t.TableName }

// Put implements [Table].
func (t *FakeTable[K, V]) Put(k K, v V) error {
	if _, ok := t.Entries[k]; !ok && t.Capacity != 0 && len(t.Entries) >= t.Capacity {
		return fmt.Errorf("map %s, %d entries: %w", t.TableName, t.Capacity, ErrFull)
	}

	return t.write("put", func() { t.Entries[k] = v })
}

// Delete implements [Table].
func (t *FakeTable[K, V]) Delete(k K) error {
	return t.write("delete", func() { delete(t.Entries, k) })
}

func (t *FakeTable[K, V]) write(operation string, do func()) error {
	if t.Fail != nil {
		if err := t.Fail(t.TableName, operation); err != nil {
			return fmt.Errorf("map %s: %s: %w", t.TableName, operation, err)
		}
	}
	do()
	if t.Wrote != nil {
		t.Wrote(t.TableName, operation)
	}

	return nil
}

// Lookup implements [Table].
func (t *FakeTable[K, V]) Lookup(k K) (V, bool, error) {
	v, ok := t.Entries[k]

	return v, ok, nil
}

// All implements [Table].
func (t *FakeTable[K, V]) All() iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		for k, v := range t.Entries {
			if !yield(Entry[K, V]{k, v}, nil) {
				return
			}
		}
	}
}
