package reconcile

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// guard watches every write to fake maps, and says what is wrong after it, as a
// packet that arrives then would see it.
type guard struct {
	*maps.Fakes
	clock *testClock
	// needed is until when programs may still read a backend: they may have
	// looked at a frontend that led to it.
	needed map[uint32]time.Time
	// reading is the same for slots.
	reading map[uint32]time.Time
	// fences are the source ranges that a Service may have now: those that it
	// has had since it was last programmed. Nil: any.
	fences map[lb.ServiceName][][]netip.Prefix
	// node is what is known of the node's own addresses.
	node map[maps.Addr]maps.AddrUse
	// dialling is until when programs may begin flows to an address: they may
	// have looked at a frontend that had it.
	dialling map[maps.Addr]time.Time
	flows    []*guardedFlow // that live
	loads    *guardedLoads
	errs     []error
}

func newGuard(f *maps.Fakes, clock *testClock) *guard {
	return &guard{
		Fakes: f, clock: clock, needed: make(map[uint32]time.Time), reading: make(map[uint32]time.Time),
		dialling: make(map[maps.Addr]time.Time), loads: newGuardedLoads(),
	}
}

// guardedFlow is a flow that must not be cut.
type guardedFlow struct {
	dialled maps.Addr
	ended   bool
}

// beginFlow has a client dial what any client can, if there is anything.
func (g *guard) beginFlow(r *rand.Rand) {
	var addrs []maps.Addr
	for addr, until := range g.dialling {
		if g.clock.now.Before(until) {
			addrs = append(addrs, addr)
		}
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
	t.Backends = guardedBackends{g.Tables.Backends, g}
	t.Slots = guardedSlots{g.Tables.Slots, g}
	t.Addrs = guardedAddrs{g.Tables.Addrs, g}
	t.Loads = g.loads

	return t
}

// guardedBackends refuse to delete what programs may still read, and to have one
// backend be taken for another.
type guardedBackends struct {
	maps.Table[uint32, maps.Backend]
	g *guard
}

func (t guardedBackends) Put(id uint32, b maps.Backend) error {
	if err := t.g.loads.begin(id, b); err != nil {
		t.g.errs = append(t.g.errs, err)
	}

	return t.Table.Put(id, b)
}

func (t guardedBackends) Delete(id uint32) error {
	if t.g.clock.now.Before(t.g.needed[id]) {
		t.g.errs = append(t.g.errs, fmt.Errorf("backend %d is deleted before its grace period ends", id))
	}

	return t.Table.Delete(id)
}

// guardedSlots refuse to overwrite what programs may still read.
type guardedSlots struct {
	maps.Slots
	g *guard
}

func (s guardedSlots) Set(i, id uint32) error {
	if s.g.clock.now.Before(s.g.reading[i]) {
		s.g.errs = append(s.g.errs, fmt.Errorf("slot %d is written before its grace period ends", i))
	}

	return s.Slots.Set(i, id)
}

// guardedAddrs refuse to write what is there, and to forget what the node has.
type guardedAddrs struct {
	maps.Table[maps.Addr, maps.AddrUse]
	g *guard
}

func (t guardedAddrs) Put(k maps.Addr, v maps.AddrUse) error {
	have, there := t.g.Addrs.Entries[k]
	if there && have == v {
		t.g.errs = append(t.g.errs, fmt.Errorf("address %s is written without a change", k.IP()))
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
		t.g.errs = append(t.g.errs, fmt.Errorf("address %s is the node's, and stops to be", k.IP()))
	}
}

// check notes what is wrong now.
func (g *guard) check() {
	owners := make(map[uint32]span) // slot → extent
	for key, f := range g.Frontends.Entries {
		err := g.checkFrontend(f, owners)
		if !ofEveryAddr(key) {
			err = errors.Join(err, g.checkAddr(key.Addr))
			g.dialling[key.Addr] = g.clock.now.Add(DefaultGrace)
		}
		if err != nil {
			g.errs = append(g.errs, fmt.Errorf("frontend %s: %w", modelKey(key), err))
		}
	}
	for _, f := range g.flows {
		if err := g.checkAddr(f.dialled); err != nil {
			g.errs = append(g.errs, fmt.Errorf("a flow is cut: %w", err))
		}
	}
	for id, b := range g.Backends.Entries {
		if _, ok := g.ServicePorts.Entries[b.FrontendId]; !ok {
			g.errs = append(g.errs, fmt.Errorf("backend %d: id %d has no name", id, b.FrontendId))
		}
	}
}

func (g *guard) checkAddr(addr maps.Addr) error {
	if g.Addrs.Entries[addr].Flags&maps.AddrService == 0 {
		return fmt.Errorf("address %s is not known as a Service's", addr.IP())
	}

	return nil
}

func (g *guard) checkFrontend(f maps.Frontend, owners map[uint32]span) error {
	if _, ok := g.ServicePorts.Entries[f.Id]; !ok {
		return fmt.Errorf("id %d has no name", f.Id)
	}
	if f.Flags&maps.FrontendSourceRanges != 0 && g.fences != nil && !g.hasRanges(f.Id) {
		return fmt.Errorf("id %d does not have its source ranges", f.Id)
	}
	if f.SlotCount > 0 && f.SlotBase == 0 {
		return errors.New("slot 0 is used")
	}
	extent := span{f.SlotBase, f.SlotCount + f.TableSize}
	for i := extent.base; i < extent.end(); i++ {
		if owner, ok := owners[i]; ok && owner != extent {
			return fmt.Errorf("extents %v and %v overlap", owner, extent)
		}
		owners[i] = extent
		g.reading[i] = g.clock.now.Add(DefaultGrace)
	}
	if err := g.checkTable(f); err != nil {
		return err
	}
	var last uint32
	for i := f.SlotBase; i < f.SlotBase+f.SlotCount; i++ {
		id, err := g.Slots.Get(i)
		if err != nil {
			return err
		}
		b, ok := g.Backends.Entries[id]
		switch {
		case !ok:
			return fmt.Errorf("slot %d: backend %d does not exist", i, id)
		case b.FrontendId != f.Id:
			return fmt.Errorf("slot %d: backend %d belongs to id %d, not %d", i, id, b.FrontendId, f.Id)
		case id <= last:
			return fmt.Errorf("slot %d: backend %d after %d", i, id, last)
		}
		last = id
		g.needed[id] = g.clock.now.Add(DefaultGrace)
	}

	return nil
}

// hasRanges says whether the source ranges of id are complete.
func (g *guard) hasRanges(id uint32) bool {
	name := g.ServicePorts.Entries[id]
	namespace, service, _ := name.Parts()
	return slices.ContainsFunc(g.fences[lb.ServiceName{Namespace: namespace, Name: service}], func(fence []netip.Prefix) bool {
		count := 0
		for _, prefix := range fence {
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
	err := errors.Join(g.errs...)
	g.errs = nil

	return err
}

// meaning says what the maps mean, without ids and slots: two sets of maps of
// the same meaning treat every client alike. Backends that no frontend leads to
// are left out.
func meaning(f *maps.Fakes) []string {
	var lines []string
	for key, v := range f.Frontends.Entries {
		name := f.ServicePorts.Entries[v.Id]
		line := fmt.Sprintf("frontend %s: %s/%d/%d kind=%d flags=%d affinity=%d",
			modelKey(key), name, name.Proto, name.Family, v.Kind, v.Flags, v.AffinitySeconds)
		line += fmt.Sprintf(" algorithm=%d table=%d", v.Algorithm, v.TableSize)
		var backends []string
		for i := v.SlotBase; i < v.SlotBase+v.SlotCount; i++ {
			b := f.Backends.Entries[f.Slots.IDs[i]]
			backends = append(backends, fmt.Sprintf("%s(%d)", b.AddrPort(), b.Flags))
		}
		slices.Sort(backends)
		lines = append(lines, fmt.Sprint(line, backends))
	}
	for key := range f.SourceRanges.Entries {
		name := f.ServicePorts.Entries[key.FrontendId]
		lines = append(lines, fmt.Sprintf("range %s/%d/%d: %s", name, name.Proto, name.Family, key.Prefix()))
	}
	for key, v := range f.Addrs.Entries {
		addr, use := addrText(key, v)
		lines = append(lines, fmt.Sprintf("addr %s: %s", addr, use))
	}
	slices.Sort(lines)

	return lines
}
