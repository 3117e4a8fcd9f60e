package maps

import (
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Array is one of the arrays that the agent fills, mapped into this process' memory: a write is a
// few stores and no system call. It grows by chunks as places are written. [NewFakeArray] makes
// one without a kernel, for tests and dry runs.
//
// Every store is of one 32-bit word, with release order: a reader that sees it also sees all
// earlier stores. Any goroutine may read; only one may write.
type Array[V any] struct {
	Faults

	name     string
	perChunk int
	limit    atomic.Int64 // maximum number of places
	grow     func(chunks int) ([]unsafe.Pointer, error)

	adding sync.Mutex
	chunks []atomic.Pointer[byte] // the memory of each; nil: it does not exist
}

// newArray returns an array without chunks, which can have most of them. Grow makes chunks until there
// are at least that many, and returns the memory of each.
func newArray[V any](name string, perChunk, most int, grow func(chunks int) ([]unsafe.Pointer, error)) *Array[V] {
	a := &Array[V]{name: name, perChunk: perChunk, grow: grow, chunks: make([]atomic.Pointer[byte], most)}
	a.limit.Store(int64(perChunk) * int64(most))

	return a
}

// NewFakeArray returns an array in ordinary memory, with room for limit values.
func NewFakeArray[V any](name string, limit int) *Array[V] {
	perChunk := max(64, (limit+maxChunks-1)/maxChunks)
	var memory []unsafe.Pointer
	a := newArray[V](name, perChunk, maxChunks, func(chunks int) ([]unsafe.Pointer, error) {
		for len(memory) < chunks {
			words := make([]uint64, perChunk*stride[V]()/8)
			memory = append(memory, unsafe.Pointer(&words[0]))
		}

		return memory, nil
	})
	a.SetLimit(limit)

	return a
}

// stride returns the distance between two values: the kernel rounds them up to eight bytes.
func stride[V any]() int {
	var v V

	return (int(unsafe.Sizeof(v)) + 7) / 8 * 8
}

// wordsOf returns the 32-bit words of a value, which must consist of such words.
func wordsOf[V any](v *V) []uint32 {
	return unsafe.Slice((*uint32)(unsafe.Pointer(v)), unsafe.Sizeof(*v)/4)
}

// Name returns the name of the map, which is also that of its pin.
func (a *Array[V]) Name() string { return a.name }

// Limit returns the maximum number of places.
func (a *Array[V]) Limit() int { return int(a.limit.Load()) }

// SetLimit sets a limit below that of the map itself.
func (a *Array[V]) SetLimit(places int) { a.limit.Store(int64(min(places, a.perChunk*len(a.chunks)))) }

// Len returns the number of places that exist: all up to the end of the last chunk.
func (a *Array[V]) Len() int {
	for i := len(a.chunks) - 1; i >= 0; i-- {
		if a.chunks[i].Load() != nil {
			return min((i+1)*a.perChunk, a.Limit())
		}
	}

	return 0
}

func chunksFor(places, perChunk int) int { return (places + perChunk - 1) / perChunk }

// place returns the words at a place, or nil if its chunk does not exist.
func (a *Array[V]) place(i uint32) []uint32 {
	if int(i)/a.perChunk >= len(a.chunks) {
		return nil
	}
	chunk := a.chunks[int(i)/a.perChunk].Load()
	if chunk == nil {
		return nil
	}
	v := (*V)(unsafe.Add(unsafe.Pointer(chunk), int(i)%a.perChunk*stride[V]()))

	return wordsOf(v)
}

// Reserve makes places 0 to n-1 exist. It returns an error wrapping [ErrFull] if n is above the
// limit, or the kernel has no memory for them.
func (a *Array[V]) Reserve(n int) error {
	if n > a.Limit() {
		return fmt.Errorf("map %s, %d places: %w", a.name, a.Limit(), ErrFull)
	}
	if n > 0 && a.place(uint32(n-1)) != nil {
		return nil
	}
	a.adding.Lock()
	defer a.adding.Unlock()
	have, need := chunksFor(a.Len(), a.perChunk), chunksFor(n, a.perChunk)
	if need <= have {
		return nil
	}
	memory, err := a.grow(need)
	if err != nil && len(memory) < need {
		return fmt.Errorf("map %s, %d places: %w: %w", a.name, a.Len(), ErrFull, err)
	}
	for i := have; i < len(memory); i++ {
		a.chunks[i].Store((*byte)(memory[i]))
	}

	return nil
}

// Get returns the value at a place; that of a place that does not exist is zero.
func (a *Array[V]) Get(i uint32) V {
	var v V
	if int(i) < a.Limit() {
		to := wordsOf(&v)
		for w, from := 0, a.place(i); w < len(from); w++ {
			to[w] = atomic.LoadUint32(&from[w])
		}
	}

	return v
}

// Put writes v to a place. It stores the words that differ, the first word of V last: where that
// identifies the owner of the place, the rest is complete by then. The error wraps [ErrFull] if
// the place cannot exist.
func (a *Array[V]) Put(i uint32, v V) error {
	if err := a.refused(a.name, "put"); err != nil {
		return err
	}
	if int(i) >= a.Limit() || a.place(i) == nil {
		if err := a.Reserve(int(i) + 1); err != nil {
			return err
		}
	}
	from, to := wordsOf(&v), a.place(i)
	for w := len(to) - 1; w >= 0; w-- {
		if atomic.LoadUint32(&to[w]) == from[w] {
			continue
		}
		atomic.StoreUint32(&to[w], from[w])
		if a.Wrote != nil {
			a.Wrote(a.name, "put")
		}
	}

	return nil
}

// All yields every value that is not all zero, in order.
func (a *Array[V]) All() iter.Seq2[uint32, V] {
	return func(yield func(uint32, V) bool) {
		for c := range a.chunks {
			chunk := a.chunks[c].Load()
			if chunk == nil {
				continue
			}
			for n := range a.perChunk {
				// Most of a large array is zero, and is not copied.
				if isZero(wordsOf((*V)(unsafe.Add(unsafe.Pointer(chunk), n*stride[V]())))) {
					continue
				}
				i := uint32(c*a.perChunk + n)
				v := a.Get(i)
				if !isZero(wordsOf(&v)) && !yield(i, v) {
					return
				}
			}
		}
	}
}

func isZero(words []uint32) bool {
	for i := range words {
		if atomic.LoadUint32(&words[i]) != 0 {
			return false
		}
	}

	return true
}
