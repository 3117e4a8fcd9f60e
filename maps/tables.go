package maps

import (
	"errors"
	"fmt"
	"sync"
)

// Tables are the maps that the agent writes.
type Tables struct {
	FrontendIDs  Table[FrontendKey, uint32]
	Frontends    *Array[Frontend]              // by frontend id
	Pools        *Array[Pool]                  // by pool id
	Slots        *Array[uint32]                // backend ids
	Backends     *Array[Backend]               // by the index of a backend id
	ServicePorts Table[uint32, ServicePort]    // by service port id
	Addrs        Table[Addr, AddrUse]          //
	AddrFilter   *AddrFilter                   // a bit for each of Addrs
	PortFilter   *PortFilter                   //
	Devices      Table[uint32, Device]         // by ifindex
	SourceRanges Table[SourceRangeKey, uint32] // the value is always 1
	ServiceCIDRs Table[CIDRKey, uint32]        // the value is always 1
	CIDRCovers   *CIDRCovers                   // of ServiceCIDRs
	LocalCIDRs   Table[CIDRKey, uint32]        // the value is always 1
	OptedOut     Table[PodUID, uint32]         // the value is always 1
	Loads        Loads                         // programs and package flow write them
	Health       *Array[BackendHealth]         // programs write it; by the index of a backend id
	Counts       Counts
}

// Counts are the counts of service ports: [Stats], or a fake.
type Counts interface {
	// Reserve makes room for n service ports.
	Reserve(n int) error
	// Begin resets the counts of an id that is assigned to a service port. The error wraps [ErrFull]
	// if there is no room.
	Begin(servicePortID uint32) error
	// End deletes the counts of a service port whose id is freed.
	End(servicePortID uint32) error
}

// Room is a number of places in each of the arrays.
type Room struct {
	Frontends, Pools, Slots, Backends, ServicePorts int
}

// Plus returns the room for both.
func (r Room) Plus(more Room) Room {
	return Room{
		r.Frontends + more.Frontends, r.Pools + more.Pools, r.Slots + more.Slots,
		r.Backends + more.Backends, r.ServicePorts + more.ServicePorts,
	}
}

// Reserve makes this many places exist, so that writes to them need not wait for programs to end:
// here, all arrays wait concurrently. Any goroutine may call it. The error wraps [ErrFull]; the
// places that there is room for exist nevertheless.
func (t *Tables) Reserve(room Room) error {
	reserve := []func() error{
		func() error { return t.Frontends.Reserve(room.Frontends) },
		func() error { return t.Pools.Reserve(room.Pools) },
		func() error { return t.Slots.Reserve(room.Slots) },
		func() error { return t.Backends.Reserve(room.Backends) },
		func() error { return t.Loads.Reserve(room.Backends) },
		func() error { return t.Health.Reserve(room.Backends) },
		func() error { return t.Counts.Reserve(room.ServicePorts) },
	}
	errs := make([]error, len(reserve))
	var all sync.WaitGroup
	for i, array := range reserve {
		all.Go(func() { errs[i] = array() })
	}
	all.Wait()

	return errors.Join(errs...)
}

// frontendTries is how often a frontend is looked up that changes during the lookup.
const frontendTries = 4

// FrontendOf returns the frontend at a key and its pool, as programs find them; false if there is
// no such frontend.
func (t *Tables) FrontendOf(key FrontendKey) (Frontend, Pool, bool, error) {
	for range frontendTries {
		id, ok, err := t.FrontendIDs.Lookup(key)
		if err != nil || !ok {
			return Frontend{}, Pool{}, false, err
		}
		f := t.Frontends.Get(id)
		p := t.Pools.Get(f.PoolId)
		// The agent waits for programs before it reuses a place, but not for other processes.
		if f.Key == key && t.Frontends.Get(id) == f {
			return f, p, true, nil
		}
	}

	return Frontend{}, Pool{}, false, fmt.Errorf("frontend %s: its id leads to another frontend", key.AddrPort())
}

// BackendOf returns the backend with this id; false if it is gone.
func (t *Tables) BackendOf(id uint32) (Backend, bool) {
	b := t.Backends.Get(Index(id))

	return b, id != 0 && b.Id == id
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
}

// NewFakes returns empty fake tables with room for slots slots.
func NewFakes(slots int) *Fakes {
	const places = 1 << 20
	f := &Fakes{
		FrontendIDs:  newFakeTable[FrontendKey, uint32](NameFrontendIDs),
		ServicePorts: newFakeTable[uint32, ServicePort](NameServicePorts),
		Addrs:        newFakeTable[Addr, AddrUse](NameAddrs),
		SourceRanges: newFakeTable[SourceRangeKey, uint32](NameSourceRanges),
		ServiceCIDRs: newFakeTable[CIDRKey, uint32](NameServiceCIDRs),
		LocalCIDRs:   newFakeTable[CIDRKey, uint32](NameLocalCIDRs),
		OptedOut:     newFakeTable[PodUID, uint32](NameOptedOut),
		Devices:      newFakeTable[uint32, Device](NameDevices),
	}
	f.Tables = Tables{
		FrontendIDs:  f.FrontendIDs,
		Frontends:    NewFakeArray[Frontend](NameFrontends, places),
		Pools:        NewFakeArray[Pool](NamePools, places),
		Slots:        NewFakeArray[uint32](NameSlots, slots),
		Backends:     NewFakeArray[Backend](NameBackends, places),
		ServicePorts: f.ServicePorts, Addrs: f.Addrs,
		AddrFilter:   newAddrFilter(shared[uint64]{values: make([]uint64, abiAddrFilterADDR_FILTER_WORDS)}),
		PortFilter:   &PortFilter{shared[byte]{values: make([]byte, 1<<16)}},
		CIDRCovers:   newCIDRCovers(shared[uint64]{values: make([]uint64, abiCidrCoverCIDR_COVERS)}),
		SourceRanges: f.SourceRanges, ServiceCIDRs: f.ServiceCIDRs,
		LocalCIDRs: f.LocalCIDRs, OptedOut: f.OptedOut, Devices: f.Devices,
		Loads: Loads{
			NewFakeArray[BackendLoad](NameBackendLoad, places),
			NewFakeArray[BackendHandshakes](NameBackendHandshakes, places),
		},
		Health: NewFakeArray[BackendHealth](NameHealth, places),
		Counts: noCounts{},
	}

	return f
}

// noCounts are the [Counts] of fakes.
type noCounts struct{}

func (noCounts) Reserve(int) error { return nil }

func (noCounts) Begin(uint32) error { return nil }

func (noCounts) End(uint32) error { return nil }

// Observe sets Fail and Wrote of every table.
func (f *Fakes) Observe(fail func(table, operation string) error, wrote func(table, operation string)) {
	f.FrontendIDs.Fail, f.FrontendIDs.Wrote = fail, wrote
	f.Frontends.Fail, f.Frontends.Wrote = fail, wrote
	f.Pools.Fail, f.Pools.Wrote = fail, wrote
	f.Slots.Fail, f.Slots.Wrote = fail, wrote
	f.Backends.Fail, f.Backends.Wrote = fail, wrote
	f.ServicePorts.Fail, f.ServicePorts.Wrote = fail, wrote
	f.Addrs.Fail, f.Addrs.Wrote = fail, wrote
	f.SourceRanges.Fail, f.SourceRanges.Wrote = fail, wrote
	f.ServiceCIDRs.Fail, f.ServiceCIDRs.Wrote = fail, wrote
	f.LocalCIDRs.Fail, f.LocalCIDRs.Wrote = fail, wrote
	f.OptedOut.Fail, f.OptedOut.Wrote = fail, wrote
	f.Devices.Fail, f.Devices.Wrote = fail, wrote
}

func newFakeTable[K comparable, V any](name string) *FakeTable[K, V] {
	return &FakeTable[K, V]{TableName: name, Entries: map[K]V{}}
}
