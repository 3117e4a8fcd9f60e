package reconcile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// guard watches every store to fake maps, and notes what is wrong after it: as a packet that
// arrives then would see it, and as every program would that began earlier and has read any
// part of its way. A program ends at the latest when a grace period ends that began after it.
type guard struct {
	*maps.Fakes
	clock *testClock
	tick  int // counts stores
	begun int // when the grace period began that runs; zero: none runs

	// What programs may have read, and when one was last able to.
	frontends map[uint32]heldFrontend
	pools     map[readPool]heldPool
	backends  map[uint32]heldBackend // by id

	// given are the backends that an id stood for, for ever.
	given map[uint32]endpoint
	// ranges are the source ranges that a Service may have now: those that it has had since
	// it was last programmed. Nil: any.
	ranges map[lb.ServiceName][][]netip.Prefix
	// node is what is known of the node's own addresses.
	node map[maps.Addr]maps.AddrUse
	// dialling are the addresses to which programs may begin flows: they may have looked at
	// a frontend that had it. Until when is the tick.
	dialling map[maps.Addr]int
	flows    []*guardedFlow // that live
	errs     []error
}

type heldFrontend struct {
	key  maps.FrontendKey
	last int
}

// readPool is a pool as a program has read it: one that shrinks is read in several states.
type readPool struct {
	id    uint32
	value maps.Pool
}

type heldPool struct {
	members []uint32
	last    int
}

type heldBackend struct {
	value maps.Backend
	last  int
}

func newGuard(f *maps.Fakes, clock *testClock) *guard {
	return &guard{
		Fakes: f, clock: clock, frontends: make(map[uint32]heldFrontend), pools: make(map[readPool]heldPool),
		backends: make(map[uint32]heldBackend), given: make(map[uint32]endpoint), dialling: make(map[maps.Addr]int),
	}
}

// restart: programs that ran at the time of the last agent may run on.
func (g *guard) restart() { g.begun = 0 }

func (g *guard) beginGrace() { g.begun = g.tick }

// endGrace ends what began before the grace period.
func (g *guard) endGrace() {
	for id, held := range g.frontends {
		if held.last < g.begun {
			delete(g.frontends, id)
		}
	}
	for id, held := range g.pools {
		if held.last < g.begun {
			delete(g.pools, id)
		}
	}
	for id, held := range g.backends {
		if held.last < g.begun {
			delete(g.backends, id)
		}
	}
	for addr, last := range g.dialling {
		if last < g.begun {
			delete(g.dialling, addr)
		}
	}
	g.begun = 0
}

// guardedFlow is a flow that must not be cut.
type guardedFlow struct {
	dialled maps.Addr
	ended   bool
}

// beginFlow has a client dial what any client can, if there is anything.
func (g *guard) beginFlow(r *rand.Rand) {
	var addrs []maps.Addr
	for addr := range g.dialling {
		addrs = append(addrs, addr)
	}
	if len(addrs) > 0 {
		slices.SortFunc(addrs, compareAddrs)
		g.flows = append(g.flows, &guardedFlow{dialled: addrs[r.IntN(len(addrs))]})
	}
}

// endFlow ends any flow.
func (g *guard) endFlow(r *rand.Rand) {
	if n := len(g.flows); n > 0 {
		i := r.IntN(n)
		g.flows[i].ended = true
		g.flows = slices.Delete(g.flows, i, i+1)
	}
}

// tables returns the maps with the guard before them.
func (g *guard) tables() maps.Tables {
	t := g.Tables
	t.Addrs = guardedAddrs{g.Tables.Addrs, g}

	return t
}

// guardedAddrs refuse to write what is there, and to forget what the node has.
type guardedAddrs struct {
	maps.Table[maps.Addr, maps.AddrUse]
	g *guard
}

func (t guardedAddrs) Put(k maps.Addr, v maps.AddrUse) error {
	have, there := t.g.Addrs.Entries[k]
	if there && have == v {
		t.g.fail("address %s is written without a change", k.IP())
	}
	t.keepsNode(k, have, v)

	return t.Table.Put(k, v)
}

func (t guardedAddrs) Delete(k maps.Addr) error {
	t.keepsNode(k, t.g.Addrs.Entries[k], maps.AddrUse{})

	return t.Table.Delete(k)
}

// keepsNode refuses to replace what is right about an address of the node.
func (t guardedAddrs) keepsNode(k maps.Addr, have, v maps.AddrUse) {
	have.Flags &^= maps.AddrService
	v.Flags &^= maps.AddrService
	if want, ok := t.g.node[k]; ok && have == want && v != want {
		t.g.fail("address %s is the node's, and stops to be", k.IP())
	}
}

func (g *guard) fail(format string, args ...any) {
	g.errs = append(g.errs, fmt.Errorf(format, args...))
}

// check notes what is wrong now.
func (g *guard) check() {
	g.tick++
	owners := make(map[uint32]uint32) // slot → pool
	for key, id := range g.FrontendIDs.Entries {
		if err := g.checkFrontend(key, id, owners); err != nil {
			g.fail("frontend %s: %w", modelKey(key), err)
		}
		if ofEveryAddr(key) {
			if !g.PortFilter.May(maps.Port(key.Port)) {
				g.fail("node port %d is not in the filter", maps.Port(key.Port))
			}

			continue
		}
		if err := g.checkAddr(key.Addr); err != nil {
			g.fail("frontend %s: %w", modelKey(key), err)
		}
		g.dialling[key.Addr] = g.tick
	}
	for _, f := range g.flows {
		if err := g.checkAddr(f.dialled); err != nil {
			g.fail("a flow is cut: %w", err)
		}
	}
	for addr := range g.Addrs.Entries {
		if !g.AddrFilter.May(addr) {
			g.fail("address %s is not in the filter", addr.IP())
		}
	}
	for cidr := range g.ServiceCIDRs.Entries {
		if !g.CIDRCovers.May(cidr.Addr) {
			g.fail("Service CIDR %s is not covered", cidr.Prefix())
		}
	}
	g.checkHeld()
}

func (g *guard) checkAddr(addr maps.Addr) error {
	if g.Addrs.Entries[addr].Flags&maps.AddrService == 0 {
		return fmt.Errorf("address %s is not known as a Service's", addr.IP())
	}

	return nil
}

// checkFrontend looks at all that a program can find which begins now.
func (g *guard) checkFrontend(key maps.FrontendKey, id uint32, owners map[uint32]uint32) error {
	f := g.Tables.Frontends.Get(id)
	if f.Key != key {
		return fmt.Errorf("place %d is another's", id)
	}
	if held, ok := g.frontends[id]; ok && held.key != key {
		return fmt.Errorf("place %d is used again while programs know it as %s", id, modelKey(held.key))
	}
	g.frontends[id] = heldFrontend{key, g.tick}
	v := g.Pools.Get(f.PoolId)
	if _, ok := g.ServicePorts.Entries[v.ServicePortId]; !ok {
		return fmt.Errorf("pool %d: id %d has no name", f.PoolId, v.ServicePortId)
	}
	if v.Flags&maps.PoolSourceRanges != 0 && g.ranges != nil && !g.hasRanges(v.ServicePortId) {
		return fmt.Errorf("id %d does not have its source ranges", v.ServicePortId)
	}
	for _, s := range []span{{v.SlotBase, v.SlotCount}, {v.TableBase, v.TableSize}} {
		for i := range s.count {
			slot := s.base + i
			if owner, ok := owners[slot]; slot == 0 || ok && owner != f.PoolId {
				return fmt.Errorf("slot %d is that of pool %d and %d", slot, owner, f.PoolId)
			}
			owners[slot] = f.PoolId
		}
	}
	members, err := g.members(v)
	if err != nil {
		return fmt.Errorf("pool %d: %w", f.PoolId, err)
	}
	read := readPool{f.PoolId, v}
	held, known := g.pools[read]
	if !known {
		held.members = members
	}
	if !known && !g.knowsPool(f.PoolId) {
		if err := g.checkTable(v, members); err != nil {
			return fmt.Errorf("pool %d: %w", f.PoolId, err)
		}
	}
	held.last = g.tick
	g.pools[read] = held
	for _, id := range held.members {
		if b := g.Tables.Backends.Get(maps.Index(id)); b.Id == id {
			g.backends[id] = heldBackend{b, g.tick}
		}
	}

	return nil
}

// knowsPool reports whether programs may have read a pool.
func (g *guard) knowsPool(id uint32) bool {
	for read := range g.pools {
		if read.id == id {
			return true
		}
	}

	return false
}

// members returns the backends of a pool, which all must be there.
func (g *guard) members(v maps.Pool) ([]uint32, error) {
	var members []uint32
	for i := range v.SlotCount {
		id := g.Slots.Get(v.SlotBase + i)
		b := g.Tables.Backends.Get(maps.Index(id))
		switch {
		case id == 0 || b.Id != id:
			return nil, fmt.Errorf("slot %d: backend %d does not exist", v.SlotBase+i, id)
		case b.ServicePortId != v.ServicePortId:
			return nil, fmt.Errorf("slot %d: backend %d belongs to id %d, not %d", v.SlotBase+i, id, b.ServicePortId, v.ServicePortId)
		case i > 0 && id < members[i-1]:
			return nil, fmt.Errorf("slot %d: backend %d after %d", v.SlotBase+i, id, members[i-1])
		}
		if was, ok := g.given[id]; ok && was != (endpoint{b.Addr, maps.Port(b.Port)}) {
			return nil, fmt.Errorf("backend %d was %s once", id, was.addrPort())
		}
		g.given[id] = endpoint{b.Addr, maps.Port(b.Port)}
		members = append(members, id)
	}

	return members, nil
}

// checkTable says what is wrong with the table of a new pool: it is there if the algorithm
// hashes, and says what any node's would say.
func (g *guard) checkTable(v maps.Pool, members []uint32) error {
	size := 0
	if Hashes(v.Algorithm) {
		size = maglev.Size(len(members))
	}
	if int(v.TableSize) != size {
		return fmt.Errorf("algorithm %d has a table of %d for %d backends, not %d", v.Algorithm, v.TableSize, len(members), size)
	}
	if size == 0 {
		return nil
	}
	addrs := make([]netip.AddrPort, len(members))
	for i, id := range members {
		addrs[i] = g.Tables.Backends.Get(maps.Index(id)).AddrPort()
	}
	for i, member := range maglev.Table(addrs) {
		if id := g.Slots.Get(v.TableBase + uint32(i)); id != members[member] {
			return fmt.Errorf("entry %d of the table leads to backend %d, not to %d", i, id, members[member])
		}
	}

	return nil
}

// checkHeld looks at what programs find that have read a part of the way before.
func (g *guard) checkHeld() {
	for id, held := range g.frontends {
		f := g.Tables.Frontends.Get(id)
		if f.Key != held.key {
			g.fail("place %d is not %s any more, and programs may know it", id, modelKey(held.key))
		} else if !g.knowsPool(f.PoolId) {
			g.fail("place %d, %s, leads to pool %d, which no program could read", id, modelKey(held.key), f.PoolId)
		}
	}
	for read, held := range g.pools {
		is := g.Pools.Get(read.id)
		is.SlotCount = max(is.SlotCount, read.value.SlotCount)
		if is.TableSize == 0 {
			is.TableSize = read.value.TableSize
		}
		if is != read.value {
			g.fail("pool %d was %+v and is %+v, and programs may know it", read.id, read.value, is)
		}
		for _, s := range []span{{is.SlotBase, is.SlotCount}, {is.TableBase, is.TableSize}} {
			for i := range s.count {
				if id := g.Slots.Get(s.base + i); !holds(held.members, id) {
					g.fail("slot %d leads to backend %d, and programs may know it", s.base+i, id)
				}
			}
		}
	}
	for id, held := range g.backends {
		is := g.Tables.Backends.Get(maps.Index(id))
		if is.Id == 0 {
			is.Id = id
		}
		is.Flags = held.value.Flags
		if is != held.value {
			g.fail("backend %d was %+v and is %+v, and programs may know it", id, held.value, is)
		}
	}
}

// hasRanges reports whether the source ranges of id are complete.
func (g *guard) hasRanges(id uint32) bool {
	name := g.ServicePorts.Entries[id]
	namespace, service, _ := name.Parts()
	return slices.ContainsFunc(g.ranges[lb.ServiceName{Namespace: namespace, Name: service}], func(ranges []netip.Prefix) bool {
		count := 0
		for _, prefix := range ranges {
			if familyOf(prefix.Addr()) != lb.Family(name.Family) {
				continue
			}
			if _, ok := g.SourceRanges.Entries[maps.SourceRangeKeyOf(id, prefix)]; !ok {
				return false
			}
			count++
		}

		return count > 0
	})
}

// err returns what was wrong since the last call.
func (g *guard) err() error {
	err := errors.Join(g.errs[:min(len(g.errs), 5)]...)
	g.errs = nil

	return err
}

// changeLoads lets connections begin and end. To a backend that is gone, none begin any
// more; one that is new has none yet.
func (o *ordeal) changeLoads() {
	loads := o.guard.Loads
	for place := range uint32(o.guard.Tables.Backends.Len()) {
		id := o.guard.Tables.Backends.Get(place).Id
		load := loads.Get(place)
		was := o.guests[place]
		if id != 0 && id != was && load != (maps.BackendLoad{}) {
			o.guard.fail("backend %d has %d connections of backend %d", id, load.Live(), was)
		}
		if id != 0 {
			o.guests[place] = id
		}
		if was == 0 && id == 0 || o.chance(90) {
			continue
		}
		if id != 0 {
			_ = loads.Put(place, maps.BackendLoad{Sockets: int32(o.IntN(3)), Flows: int32(o.IntN(2))})
		} else if o.chance(30) {
			_ = loads.Put(place, maps.BackendLoad{})
		}
	}
}

// meaning says what the maps mean, without ids and places: two sets of maps of the same
// meaning treat every client alike. Backends that no frontend leads to are left out.
func meaning(f *maps.Fakes) []string {
	var lines []string
	for key, id := range f.FrontendIDs.Entries {
		frontend := f.Tables.Frontends.Get(id)
		v := f.Pools.Get(frontend.PoolId)
		name := f.ServicePorts.Entries[v.ServicePortId]
		line := fmt.Sprintf("frontend %s: %s/%d/%d kind=%d flags=%d affinity=%d algorithm=%d table=%d",
			modelKey(key), name, name.Proto, name.Family, frontend.Kind, v.Flags, v.AffinitySeconds, v.Algorithm, v.TableSize)
		var backends []string
		for i := range v.SlotCount {
			b := f.Tables.Backends.Get(maps.Index(f.Slots.Get(v.SlotBase + i)))
			backends = append(backends, fmt.Sprintf("%s(%d)", b.AddrPort(), b.Flags))
		}
		slices.Sort(backends)
		lines = append(lines, fmt.Sprint(line, backends))
	}
	for key := range f.SourceRanges.Entries {
		name := f.ServicePorts.Entries[key.ServicePortId]
		lines = append(lines, fmt.Sprintf("range %s/%d/%d: %s", name, name.Proto, name.Family, key.Prefix()))
	}
	for key, v := range f.Addrs.Entries {
		addr, use := addrText(key, v)
		lines = append(lines, fmt.Sprintf("addr %s: %s", addr, use))
	}
	slices.Sort(lines)

	return lines
}
