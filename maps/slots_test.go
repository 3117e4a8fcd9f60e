package maps

import (
	"errors"
	"testing"
)

// What is written into memory is what the kernel, and so a program, looks up.
func TestMappedSlots(t *testing.T) {
	p := mustCreate(t, mustRoot(t), small())
	for _, i := range []uint32{0, 1, 2, 511, 512, 1023} {
		if err := p.Slots.Set(i, 1000+i); err != nil {
			t.Fatalf("slot %d: %v", i, err)
		}
	}
	for i := range uint32(1024) {
		var looked uint32
		if err := p.byName[NameSlots].Lookup(i, &looked); err != nil {
			t.Fatal(err)
		}
		got, err := p.Slots.Get(i)
		want := uint32(0)
		if i < 3 || i == 511 || i == 512 || i == 1023 {
			want = 1000 + i
		}
		if got != want || looked != want || err != nil {
			t.Errorf("slot %d: %d in memory, %d in the map, %v; want %d", i, got, looked, err, want)
		}
	}
	if _, err := p.Slots.Get(1024); err == nil {
		t.Error("no error for a slot that is not there")
	}
	if err := errors.Join(p.Slots.Set(1024, 1)); err == nil {
		t.Error("no error for a write to a slot that is not there")
	}
}
