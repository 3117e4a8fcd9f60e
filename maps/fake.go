package maps

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
)

// FakeTable is a [Table] in memory, for tests and dry runs. Like a map of the kernel, it may be read while it
// is written.
type FakeTable[K comparable, V any] struct {
	TableName string
	Size      int // how many entries it can hold; zero: no limit
	Entries   map[K]V
	Faults

	mu sync.RWMutex // guards Entries
}

// Faults are what a test does to the writes of a table.
type Faults struct {
	// Fail, when set, is called before every write, which fails with its error.
	Fail func(table, operation string) error
	// Wrote, when set, is called after every successful write; of an [Array], after every store of a word.
	Wrote func(table, operation string)
}

// refused returns the error with which a write fails.
func (f *Faults) refused(table, operation string) error {
	if f.Fail == nil {
		return nil
	}
	if err := f.Fail(table, operation); err != nil {
		return fmt.Errorf("map %s: %s: %w", table, operation, err)
	}

	return nil
}

// Name implements [Table].
func (t *FakeTable[K, V]) Name() string { return t.TableName }

// Capacity implements [Table].
func (t *FakeTable[K, V]) Capacity() int { return t.Size }

// Put implements [Table].
func (t *FakeTable[K, V]) Put(k K, v V) error {
	t.mu.RLock()
	_, known := t.Entries[k]
	full := t.Size != 0 && len(t.Entries) >= t.Size
	t.mu.RUnlock()
	if full && !known {
		return fmt.Errorf("map %s, %d entries: %w", t.TableName, t.Size, ErrFull)
	}

	return t.write("put", func() { t.Entries[k] = v })
}

// Delete implements [Table].
func (t *FakeTable[K, V]) Delete(k K) error {
	return t.write("delete", func() { delete(t.Entries, k) })
}

func (t *FakeTable[K, V]) write(operation string, do func()) error {
	if err := t.refused(t.TableName, operation); err != nil {
		return err
	}
	t.mu.Lock()
	do()
	t.mu.Unlock()
	if t.Wrote != nil {
		t.Wrote(t.TableName, operation)
	}

	return nil
}

// Lookup implements [Table].
func (t *FakeTable[K, V]) Lookup(k K) (V, bool, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	v, ok := t.Entries[k]

	return v, ok, nil
}

// fakeBatch is how many entries are read at a time, as [batch] of a map of the kernel.
const fakeBatch = 256

// All implements [Table].
func (t *FakeTable[K, V]) All() iter.Seq2[Entry[K, V], error] {
	return func(yield func(Entry[K, V], error) bool) {
		t.mu.RLock()
		keys := slices.AppendSeq(make([]K, 0, len(t.Entries)), maps.Keys(t.Entries))
		t.mu.RUnlock()
		entries := make([]Entry[K, V], 0, fakeBatch)
		for part := range slices.Chunk(keys, fakeBatch) {
			entries = entries[:0]
			t.mu.RLock()
			for _, k := range part {
				if v, there := t.Entries[k]; there {
					entries = append(entries, Entry[K, V]{k, v})
				}
			}
			t.mu.RUnlock()
			for _, e := range entries {
				if !yield(e, nil) {
					return
				}
			}
		}
	}
}

// Fakes are [Tables] in memory, for tests and dry runs.
type Fakes struct {
	Tables
	FrontendIDs  *FakeTable[FrontendKey, uint32]
	ServicePorts *FakeTable[uint32, ServicePort]
	Addrs        *FakeTable[Addr, AddrUse]
	SourceRanges *FakeTable[SourceRangeKey, uint32]
	ServiceCIDRs *FakeTable[CIDRKey, uint32]
	LocalCIDRs   *FakeTable[CIDRKey, uint32]
	OptedOut     *FakeTable[PodUID, uint32]
	Devices      *FakeTable[uint32, Device]

	faults []*Faults // of every table
}

// NewFakes returns empty fake tables with room for slots slots.
func NewFakes(slots int) *Fakes {
	const places = 1 << 20
	f := &Fakes{Tables: Tables{
		Frontends:  NewFakeArray[Frontend](NameFrontends, places),
		Pools:      NewFakeArray[Pool](NamePools, places),
		Slots:      NewFakeArray[uint32](NameSlots, slots),
		Backends:   NewFakeArray[Backend](NameBackends, places),
		AddrFilter: newAddrFilter(shared[uint64]{values: make([]uint64, abiAddrFilterADDR_FILTER_WORDS)}),
		PortFilter: &PortFilter{shared[byte]{values: make([]byte, 1<<16)}},
		CIDRCovers: newCIDRCovers(shared[uint64]{values: make([]uint64, abiCidrCoverCIDR_COVERS)}),
		Loads: Loads{
			NewFakeArray[BackendLoad](NameBackendLoad, places),
			NewFakeArray[BackendHandshakes](NameBackendHandshakes, places),
		},
		Health:    NewFakeArray[BackendHealth](NameHealth, places),
		Counts:    noCounts{},
		Heartbeat: &Heartbeat{shared[uint64]{values: make([]uint64, 1)}},
	}}
	f.faults = []*Faults{&f.Frontends.Faults, &f.Pools.Faults, &f.Slots.Faults, &f.Backends.Faults}
	f.FrontendIDs = newFakeTable(f, &f.Tables.FrontendIDs, NameFrontendIDs)
	f.ServicePorts = newFakeTable(f, &f.Tables.ServicePorts, NameServicePorts)
	f.Addrs = newFakeTable(f, &f.Tables.Addrs, NameAddrs)
	f.SourceRanges = newFakeTable(f, &f.Tables.SourceRanges, NameSourceRanges)
	f.ServiceCIDRs = newFakeTable(f, &f.Tables.ServiceCIDRs, NameServiceCIDRs)
	f.LocalCIDRs = newFakeTable(f, &f.Tables.LocalCIDRs, NameLocalCIDRs)
	f.OptedOut = newFakeTable(f, &f.Tables.OptedOut, NameOptedOut)
	f.Devices = newFakeTable(f, &f.Tables.Devices, NameDevices)

	return f
}

func newFakeTable[K comparable, V any](f *Fakes, at *Table[K, V], name string) *FakeTable[K, V] {
	t := &FakeTable[K, V]{TableName: name, Entries: map[K]V{}}
	*at = t
	f.faults = append(f.faults, &t.Faults)

	return t
}

// noCounts are the [Counts] of fakes.
type noCounts struct{}

func (noCounts) Reserve(int) error { return nil }

func (noCounts) Begin(uint32) error { return nil }

func (noCounts) End(uint32) error { return nil }

// Observe sets the faults of every table.
func (f *Fakes) Observe(fail func(table, operation string) error, wrote func(table, operation string)) {
	for _, faults := range f.faults {
		*faults = Faults{fail, wrote}
	}
}
