package maps

import (
	"errors"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/test/lab"
)

// An array of the kernel and one in ordinary memory have the same contract.
func eachArray(t *testing.T, limit int, test func(t *testing.T, a *Array[Backend])) {
	t.Run("in ordinary memory", func(t *testing.T) {
		test(t, NewFakeArray[Backend](NameBackends, limit))
	})
	t.Run("in the kernel", func(t *testing.T) {
		p := mustCreate(t, lab.MustBPFRoot(t), small())
		p.Backends.SetLimit(limit)
		test(t, p.Backends)
	})
}

// backendNo returns a backend of which every word is different.
func backendNo(i uint32) Backend {
	addr := netip.AddrFrom16([16]byte{0: 0xfd, 5: byte(i), 9: 2, 15: byte(i)})

	return BackendOf(ID(i, 1), 100+i, netip.AddrPortFrom(addr, uint16(i+1)), BackendLocal)
}

func TestArrayGrows(t *testing.T) {
	eachArray(t, 3*4096, func(t *testing.T, a *Array[Backend]) {
		want := map[uint32]Backend{}
		for _, i := range []uint32{0, 1, 63, 64, 4095, 4096, 3*4096 - 1} {
			want[i] = backendNo(i + 1)
			if err := a.Put(i, want[i]); err != nil {
				t.Fatalf("place %d: %v", i, err)
			}
			if n := a.Len(); n <= int(i) {
				t.Errorf("%d places after a write at %d", n, i)
			}
		}
		if diff := gocmp.Diff(want, maps.Collect(a.All()), sameBackend); diff != "" {
			t.Errorf("all (-want +have):\n%s", diff)
		}
		if got := a.Get(2); got != (Backend{}) {
			t.Errorf("a place that was never written has %v", got)
		}
	})
}

var sameBackend = gocmp.Comparer(func(a, b Backend) bool { return a == b })

func TestArrayLimit(t *testing.T) {
	eachArray(t, 100, func(t *testing.T, a *Array[Backend]) {
		if n := a.Limit(); n != 100 {
			t.Errorf("limit %d, want 100", n)
		}
		if err := a.Reserve(100); err != nil || a.Len() != 100 {
			t.Errorf("reserve of all there can be: %v, and %d places", err, a.Len())
		}
		if err := a.Put(99, backendNo(99)); err != nil {
			t.Errorf("the last place: %v", err)
		}
		for what, err := range map[string]error{
			"reserve beyond the limit":        a.Reserve(101),
			"put beyond the limit":            a.Put(100, backendNo(100)),
			"put beyond what any array holds": a.Put(1<<31, backendNo(100)),
		} {
			if !errors.Is(err, ErrFull) {
				t.Errorf("%s: %v, want %v", what, err, ErrFull)
			}
		}
		for _, i := range []uint32{100, 1 << 31, 1<<32 - 1} {
			if got := a.Get(i); got != (Backend{}) {
				t.Errorf("place %d beyond the limit has %v", i, got)
			}
		}
		a.SetLimit(5000)
		if err := a.Put(4999, backendNo(4999)); err != nil {
			t.Errorf("with a higher limit: %v", err)
		}
	})
}

// The limit also applies when memory is short.
func TestArrayWithoutMemory(t *testing.T) {
	a := NewFakeArray[uint32](NameSlots, 1<<16)
	grow, failing := a.grow, true
	a.grow = func(chunks int) ([]unsafe.Pointer, error) {
		if failing && chunks > 2 {
			memory, _ := grow(2)

			return memory, unix.ENOMEM
		}

		return grow(chunks)
	}
	if err := a.Put(3*64, 1); !errors.Is(err, ErrFull) || !errors.Is(err, unix.ENOMEM) {
		t.Errorf("a third chunk: %v, want %v and %v", err, ErrFull, unix.ENOMEM)
	}
	if err := a.Put(2*64-1, 1); err != nil {
		t.Errorf("in the second chunk, which there is memory for: %v", err)
	}
	failing = false
	if err := a.Put(3*64, 1); err != nil {
		t.Errorf("when there is memory again: %v", err)
	}
}

// Put stores the first word last, and no word that is as it should be: a program that
// finds the id of a backend finds the backend.
func TestPutStoresFirstWordLast(t *testing.T) {
	eachArray(t, 4096, func(t *testing.T, a *Array[Backend]) {
		want := backendNo(7)
		var stages []Backend
		a.Wrote = func(table, operation string) {
			if table != NameBackends || operation != "put" {
				t.Errorf("%s of %s, want put of %s", operation, table, NameBackends)
			}
			stages = append(stages, a.Get(7))
		}
		lab.Must(t, a.Put(7, want))
		for i, stage := range stages[:len(stages)-1] {
			if stage.Id != 0 {
				t.Errorf("after %d stores of %d, the id is there: %+v", i+1, len(stages), stage)
			}
		}
		if last := stages[len(stages)-1]; last != want {
			t.Errorf("in the end: %+v, want %+v", last, want)
		}

		stages = nil
		want.Flags |= BackendTerminating
		lab.Must(t, a.Put(7, want))
		if diff := gocmp.Diff([]Backend{want}, stages, sameBackend); diff != "" {
			t.Errorf("stages of a change of one word (-want +have):\n%s", diff)
		}
	})
}

// A write does not happen if Fail returns an error.
func TestArrayFails(t *testing.T) {
	a := NewFakeArray[Backend](NameBackends, 64)
	lab.Must(t, a.Put(7, backendNo(7)))
	refused := errors.New("refused")
	var asked []string
	a.Fail = func(table, operation string) error {
		asked = append(asked, table+" "+operation)

		return refused
	}
	if err := a.Put(7, backendNo(8)); !errors.Is(err, refused) {
		t.Errorf("%v, want %v", err, refused)
	}
	if diff := gocmp.Diff([]string{"backends put"}, asked); diff != "" {
		t.Errorf("asked (-want +have):\n%s", diff)
	}
	if got := a.Get(7); got != backendNo(7) {
		t.Errorf("%+v, want what was there", got)
	}
}

// Any goroutine may read while one writes, even while the array grows: a reader that finds the same id before
// and after the rest has read that backend.
func TestConcurrentReads(t *testing.T) {
	eachArray(t, 4*4096, func(t *testing.T, a *Array[Backend]) {
		const places = 3 * 4096
		done := make(chan struct{})
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() {
				for i := uint32(1); ; i = (i*7 + 1) % places {
					select {
					case <-done:
						return
					default:
					}
					got := a.Get(i)
					if got.Id == 0 || a.Get(i).Id != got.Id {
						continue
					}
					if want := backendNo(i); got != want {
						t.Errorf("place %d: %+v, want %+v", i, got, want)

						return
					}
				}
			})
		}
		for i := range uint32(places) {
			b, gone := backendNo(i), backendNo(i)
			gone.Id = 0
			lab.Must(t, a.Put(i, b), a.Put(i, gone), a.Put(i, b))
		}
		close(done)
		readers.Wait()
	})
}

func TestIDs(t *testing.T) {
	for _, test := range []struct{ index, generation, id uint32 }{
		{1, 0, 1}, {5, 3, 3<<24 | 5}, {1<<24 - 1, 255, 1<<32 - 1}, {1, 256, 1},
	} {
		id := ID(test.index, test.generation)
		if id != test.id || Index(id) != test.index || Generation(id) != test.generation%256 {
			t.Errorf("index %d, generation %d: id %d, which is of index %d and generation %d",
				test.index, test.generation, id, Index(id), Generation(id))
		}
	}
}
