package maps

import (
	"errors"
	"testing"
)

// The kernel's map keeps the promises of [Table].
func TestMap(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	table := p.Frontends
	if _, ok, err := table.Lookup(web); ok || err != nil {
		t.Errorf("lookup of nothing: %v, %v", ok, err)
	}
	if err := table.Delete(web); err != nil {
		t.Errorf("delete of nothing: %v", err)
	}
	changed := webPort
	changed.SlotCount = 5
	for _, want := range []Frontend{webPort, changed} {
		if err := table.Put(web, want); err != nil {
			t.Fatal(err)
		}
		if got, ok, err := table.Lookup(web); got != want || !ok || err != nil {
			t.Errorf("lookup: %v, %v, %v, want %v", got, ok, err, want)
		}
	}
	for e, err := range table.All() {
		if e.Key != web || e.Value != changed || err != nil {
			t.Errorf("all: %v, %v", e, err)
		}
	}
	if err := table.Delete(web); err != nil {
		t.Fatal(err)
	}
	for e, err := range table.All() {
		t.Errorf("all after delete: %v, %v", e, err)
	}
}

func TestFullMap(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	for id := range uint32(16) {
		if err := p.Backends.Put(id, Backend{}); err != nil {
			t.Fatalf("backend %d of 16: %v", id, err)
		}
	}
	if err := p.Backends.Put(16, Backend{}); !errors.Is(err, ErrFull) {
		t.Errorf("one more: %v, want %v", err, ErrFull)
	}
	if err := p.Backends.Put(3, Backend{Port: 1}); err != nil {
		t.Errorf("replacing one: %v", err)
	}
	if err := errors.Join(p.Backends.Delete(3), p.Backends.Put(16, Backend{})); err != nil {
		t.Errorf("after a delete: %v", err)
	}
}
