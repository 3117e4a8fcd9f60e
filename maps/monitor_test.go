package maps

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/test/lab"
)

func mustListen(t *testing.T, p *Pinned) *Listener {
	t.Helper()
	l, err := p.Listen()
	lab.Must(t, err)

	return l
}

// rings returns how many ring buffers programs write to.
func rings(t *testing.T, p *Pinned) (n int) {
	t.Helper()
	for place := range uint32(MaxListeners) {
		var id ebpf.MapID
		if err := p.byName[NameMonitorRings].Lookup(place, &id); err == nil {
			n++
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
	}

	return n
}

// There is a place for each listener until all are taken, and a closed listener leaves nothing.
func TestListenersHavePlaces(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	var all []*Listener
	for range MaxListeners {
		all = append(all, mustListen(t, p))
	}
	if _, err := p.Listen(); !errors.Is(err, ErrFull) {
		t.Errorf("one more listens: %v", err)
	}
	if n := rings(t, p); n != MaxListeners {
		t.Errorf("%d ring buffers for %d listeners", n, MaxListeners)
	}
	for _, l := range all {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	for place := range MaxListeners {
		if until := p.listeners.values[place]; until != 0 {
			t.Errorf("place %d is taken until %d after its listener was closed", place, until)
		}
	}
	if n := rings(t, p); n != 0 {
		t.Errorf("%d ring buffers are left", n)
	}
}

// A listener that reads keeps its place; what one that was killed has left is freed.
func TestKilledListenersAreFreed(t *testing.T) {
	p := mustCreate(t, lab.MustBPFRoot(t), small())
	alive, killed, freed := mustListen(t, p), mustListen(t, p), mustListen(t, p)
	defer alive.Close()
	defer killed.reader.Close()
	defer freed.reader.Close()
	atomic.StoreUint64(&p.listeners.values[killed.place], Now()-1)
	atomic.StoreUint64(&p.listeners.values[freed.place], 0) // by a program
	lab.Must(t, p.FreeListeners())
	if n := rings(t, p); n != 1 {
		t.Errorf("%d ring buffers are left, want that of the listener that is alive", n)
	}
	if p.listeners.values[killed.place] != 0 {
		t.Error("the place of a killed listener is still taken")
	}
	alive.until -= uint64(2 * renewal) // it has read nothing for two seconds
	atomic.StoreUint64(&p.listeners.values[alive.place], alive.until)
	if _, _, err := alive.Read(time.Now()); err != nil {
		t.Error(err)
	}
	if until := p.listeners.values[alive.place]; until < Now()+uint64(lease-renewal) {
		t.Errorf("a listener that reads has its place only until %d", until)
	}
	if _, _, err := killed.Read(time.Now()); err != nil { // it was renewed less than a second ago
		t.Error(err)
	}
	killed.until -= uint64(lease)
	if _, _, err := killed.Read(time.Now()); !errors.Is(err, ErrLapsed) {
		t.Errorf("a listener whose place was freed reads: %v", err)
	}
}
