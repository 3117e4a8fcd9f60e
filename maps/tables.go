package maps

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
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
	ServiceCIDRs Table[CIDRKey, uint32]        // CIDROfServices, or CIDROfOtherProxy of single addresses
	CIDRCovers   *CIDRCovers                   // of ServiceCIDRs
	LocalCIDRs   Table[CIDRKey, uint32]        // the value is always 1
	OptedOut     Table[PodUID, uint32]         // the value is always 1
	Loads        Loads                         // programs and package flow write them
	Health       *Array[BackendHealth]         // programs write it; by the index of a backend id
	Counts       Counts
	Heartbeat    *Heartbeat
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

// Translation is an original destination, and the backend to which it was translated.
type Translation struct {
	OriginalDst, Backend      Addr
	OriginalPort, BackendPort uint16 // in network byte order
	ServicePortID, BackendID  uint32
}

// PoolOf returns the pool that serves a destination in the scope: as programs find it, by the address, then as a
// node port. It is false if there is none.
func (t *Tables) PoolOf(dst Addr, port uint16, protocol, scope uint8) (Pool, bool, error) {
	key := FrontendKey{Addr: dst, Port: port, Proto: protocol, Scope: scope}
	_, pool, ok, err := t.FrontendOf(key)
	if err == nil && !ok {
		key.Addr = AddrOf(netip.IPv6Unspecified())
		if dst.IP().Is4() {
			key.Addr = AddrOf(netip.IPv4Unspecified())
		}
		_, pool, ok, err = t.FrontendOf(key)
	}

	return pool, ok, err
}

// BackendsOf yields the backends of a pool.
func (t *Tables) BackendsOf(pool Pool) iter.Seq[Backend] {
	return func(yield func(Backend) bool) {
		for i := range pool.SlotCount {
			b, ok := t.BackendOf(t.Slots.Get(pool.SlotBase + i))
			if ok && b.ServicePortId == pool.ServicePortId && !yield(b) {
				return
			}
		}
	}
}

// HasBackend reports whether the backend of a translation exists. Its id may belong to another one by now.
func (t *Tables) HasBackend(of Translation) bool {
	b, ok := t.BackendOf(of.BackendID)

	return ok && b.ServicePortId == of.ServicePortID && b.Addr == of.Backend && b.Port == of.BackendPort
}

// IsCurrent reports whether the backend of a translation exists, and one of the scopes still leads from the original
// destination to its service port. It looks up frontends as programs do: by the address, then as a node port.
func (t *Tables) IsCurrent(of Translation, protocol uint8, scopes ...uint8) (bool, error) {
	if !t.HasBackend(of) {
		return false, nil
	}
	for _, scope := range scopes {
		pool, ok, err := t.PoolOf(of.OriginalDst, of.OriginalPort, protocol, scope)
		if err != nil || ok && pool.ServicePortId == of.ServicePortID {
			return err == nil, err
		}
	}

	return false, nil
}
