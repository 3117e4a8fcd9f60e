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

// checker checks fake maps after every store: as a packet sees them that arrives then, and as every
// program sees them that started earlier and has read a part of its way. A program ends no later
// than a grace period that began after it.
type checker struct {
	*maps.Fakes
	clock *testClock
	tick  int // counts stores
	begun int // when the grace period began that runs; zero: none runs

	// What programs may have read, and the last tick at which one could.
	frontends map[uint32]heldFrontend
	pools     map[readPool]heldPool
	backends  map[uint32]heldBackend // by id

	// given are the backends to which each id was ever assigned.
	given map[uint32]endpoint
	// ranges are the source ranges that a Service may have: all since it was last programmed. Nil: any.
	ranges map[lb.ServiceName][][]netip.Prefix
	// node is the desired entries of the node's own addresses.
	node map[maps.Addr]maps.AddrUse
	// dialling are the addresses to which programs may begin flows, because they may have read a
	// frontend there, and the tick until which they may.
	dialling map[maps.Addr]int
	flows    []*checkedFlow // that live
	owners   *owners
	errs     []error
}

type heldFrontend struct {
	key  maps.FrontendKey
	last int
}

// readPool is a pool as a program has read it: a pool that shrinks is read in several states.
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

func newChecker(f *maps.Fakes, clock *testClock) *checker {
	return &checker{
		Fakes: f, clock: clock, frontends: make(map[uint32]heldFrontend), pools: make(map[readPool]heldPool),
		backends: make(map[uint32]heldBackend), given: make(map[uint32]endpoint), dialling: make(map[maps.Addr]int),
		owners: newOwners(),
	}
}

// restart records that programs of the last agent may still run.
func (g *checker) restart() {
	g.begun = 0
	g.owners.restart()
}

func (g *checker) beginGrace() { g.begun = g.tick }

// endGrace drops what programs had read before the grace period began.
func (g *checker) endGrace() {
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

// checkedFlow is a flow that must not be cut.
type checkedFlow struct {
	originalDst maps.Addr
	ended       bool
}

// beginFlow begins a flow to a random frontend, if there is one.
func (g *checker) beginFlow(r *rand.Rand) {
	var addrs []maps.Addr
	for addr := range g.dialling {
		addrs = append(addrs, addr)
	}
	if len(addrs) > 0 {
		slices.SortFunc(addrs, compareAddrs)
		g.flows = append(g.flows, &checkedFlow{originalDst: addrs[r.IntN(len(addrs))]})
	}
}

// endFlow ends a random flow.
func (g *checker) endFlow(r *rand.Rand) {
	if n := len(g.flows); n > 0 {
		i := r.IntN(n)
		g.flows[i].ended = true
		g.flows = slices.Delete(g.flows, i, i+1)
	}
}

// tables returns the maps with the checker in front of them.
func (g *checker) tables() maps.Tables {
	t := g.Tables
	t.Addrs = checkedAddrs{g.Tables.Addrs, g}

	return t
}

// checkedAddrs is the map of addresses. It fails the test if an entry is written again unchanged,
// or one of the node is removed.
type checkedAddrs struct {
	maps.Table[maps.Addr, maps.AddrUse]
	g *checker
}

func (t checkedAddrs) Put(k maps.Addr, v maps.AddrUse) error {
	have, there := t.g.Addrs.Entries[k]
	if there && have == v {
		t.g.fail("address %s is written without a change", k.IP())
	}
	t.keepsNode(k, have, v)

	return t.Table.Put(k, v)
}

func (t checkedAddrs) Delete(k maps.Addr) error {
	t.keepsNode(k, t.g.Addrs.Entries[k], maps.AddrUse{})

	return t.Table.Delete(k)
}

// keepsNode fails the test if a correct entry of the node is replaced.
func (t checkedAddrs) keepsNode(k maps.Addr, have, v maps.AddrUse) {
	have.Flags &^= maps.AddrService
	v.Flags &^= maps.AddrService
	if want, ok := t.g.node[k]; ok && have == want && v != want {
		t.g.fail("address %s is the node's, and stops to be", k.IP())
	}
}

func (g *checker) fail(format string, args ...any) {
	g.errs = append(g.errs, fmt.Errorf(format, args...))
}

// check records the errors in the maps now.
func (g *checker) check() {
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
		if err := g.checkAddr(f.originalDst); err != nil {
			g.fail("a flow is cut: %w", err)
		}
	}
	for addr, use := range g.Addrs.Entries {
		if !g.AddrFilter.May(addr) {
			g.fail("address %s is not in the filter", addr.IP())
		}
		if use.Flags&maps.AddrNode != 0 && !g.AddrFilter.MayNode(addr) {
			g.fail("address %s of the node is not in the filter as such", addr.IP())
		}
	}
	for cidr := range g.ServiceCIDRs.Entries {
		if isCovered(cidr) && !g.CIDRCovers.May(cidr.Addr) {
			g.fail("Service CIDR %s is not covered", cidr.Prefix())
		}
	}
	g.checkHeld()
	g.checkOwners()
}

func (g *checker) checkAddr(addr maps.Addr) error {
	if g.Addrs.Entries[addr].Flags&maps.AddrService == 0 {
		return fmt.Errorf("address %s is not known as a Service's", addr.IP())
	}

	return nil
}

// checkFrontend checks all that a program can read that starts now.
func (g *checker) checkFrontend(key maps.FrontendKey, id uint32, owners map[uint32]uint32) error {
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
func (g *checker) knowsPool(id uint32) bool {
	for read := range g.pools {
		if read.id == id {
			return true
		}
	}

	return false
}

// members returns the backends of a pool, which all must be there.
func (g *checker) members(v maps.Pool) ([]uint32, error) {
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

// checkTable returns the error in the table of a new pool: it exists if the algorithm hashes, and is
// the same on every node.
func (g *checker) checkTable(v maps.Pool, members []uint32) error {
	size := 0
	if maps.Hashes(v.Algorithm) {
		size = maglev.Size(len(members), smallTable)
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
	for i, member := range maglev.Table(addrs, smallTable) {
		if id := g.Slots.Get(v.TableBase + uint32(i)); id != members[member] {
			return fmt.Errorf("entry %d of the table leads to backend %d, not to %d", i, id, members[member])
		}
	}

	return nil
}

// checkHeld checks what programs can read that have read a part of the way before.
func (g *checker) checkHeld() {
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
func (g *checker) hasRanges(id uint32) bool {
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

// err returns the errors since the last call.
func (g *checker) err() error {
	err := errors.Join(g.errs[:min(len(g.errs), 5)]...)
	g.errs = nil

	return err
}

// changeLoads begins and ends connections: none begin to a backend that is gone, a new one has none yet,
// and one that comes back has its own.
func (o *history) changeLoads() {
	loads := o.checker.Loads
	for place := range uint32(o.checker.Tables.Backends.Len()) {
		id := o.checker.Tables.Backends.Get(place).Id
		load := loads.Get(place)
		was := o.guests[place]
		if id != 0 && id != was && load != (maps.BackendLoad{}) {
			o.checker.fail("backend %d has %d connections of backend %d", id, load.Live(), was)
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

// meaning returns the content of the maps without ids and places: two sets of maps with the same
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
