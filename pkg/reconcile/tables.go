package reconcile

import (
	"errors"
	"fmt"

	"github.com/sluice-lb/sluice/maps"
)

// tables are the maps, with every write counted.
type tables struct {
	frontends    table[maps.FrontendKey, maps.Frontend]
	slots        slots
	backends     table[uint32, maps.Backend]
	servicePorts table[uint32, maps.ServicePort]
	addrs        table[maps.Addr, maps.AddrUse]
	devices      table[uint32, maps.Device]
	sourceRanges table[maps.SourceRangeKey, uint32]
	serviceCIDRs table[maps.CIDRKey, uint32]
	localCIDRs   table[maps.CIDRKey, uint32]
}

func newTables(t maps.Tables) tables {
	return tables{
		frontends:    newTable(t.Frontends),
		slots:        slots{array: t.Slots, spans: newSpans(t.Slots.Len())},
		backends:     newTable(t.Backends),
		servicePorts: newTable(t.ServicePorts),
		addrs:        newTable(t.Addrs),
		devices:      newTable(t.Devices),
		sourceRanges: newTable(t.SourceRanges),
		serviceCIDRs: newTable(t.ServiceCIDRs),
		localCIDRs:   newTable(t.LocalCIDRs),
	}
}

// fed says whether a map that was full has got room since the last call.
func (t *tables) fed() bool {
	fed := false
	for _, h := range []*hunger{
		&t.frontends.hunger, &t.slots.hunger, &t.backends.hunger,
		&t.servicePorts.hunger, &t.sourceRanges.hunger, &t.addrs.hunger,
	} {
		fed = fed || h.full && h.freed
		if h.freed {
			*h = hunger{}
		}
	}

	return fed
}

// Writes counts what was written to a map.
type Writes struct {
	Puts    uint64
	Deletes uint64
}

// hunger remembers that a map was full, and that something was freed since.
type hunger struct{ full, freed bool }

func (h *hunger) note(err error) {
	if errors.Is(err, maps.ErrFull) {
		h.full, h.freed = true, false
	}
}

// table is a map with every write counted.
type table[K comparable, V any] struct {
	maps.Table[K, V]
	writes   Writes
	used     int
	capacity int
	hunger
}

func newTable[K comparable, V any](t maps.Table[K, V]) table[K, V] {
	counted := table[K, V]{Table: t}
	if sized, ok := t.(interface{ Capacity() int }); ok {
		counted.capacity = sized.Capacity()
	}

	return counted
}

// insert writes an entry that is not there yet.
func (t *table[K, V]) insert(k K, v V) error {
	if err := t.replace(k, v); err != nil {
		return err
	}
	t.used++

	return nil
}

// replace writes an entry that is there.
func (t *table[K, V]) replace(k K, v V) error {
	err := t.Table.Put(k, v)
	t.note(err)
	if err != nil {
		return err
	}
	t.writes.Puts++

	return nil
}

// put writes an entry that is there or not.
func (t *table[K, V]) put(k K, v V, there bool) error {
	if there {
		return t.replace(k, v)
	}

	return t.insert(k, v)
}

// remove deletes an entry that is there.
func (t *table[K, V]) remove(k K) error {
	if err := t.Table.Delete(k); err != nil {
		return err
	}
	t.writes.Deletes++
	t.used--
	t.freed = true

	return nil
}

// removeStray deletes an entry that somebody else wrote.
func (t *table[K, V]) removeStray(k K) error {
	if err := t.Table.Delete(k); err != nil {
		return err
	}
	t.writes.Deletes++

	return nil
}

// slots is the array of backend ids, and which of it is free.
type slots struct {
	array  maps.Slots
	writes Writes
	spans
	hunger
}

// put writes the ids of a set of backends, and behind them their table, to free
// slots and returns the first. The error wraps [maps.ErrFull] if there are not
// enough of them in one place.
func (s *slots) put(ids, table []uint32) (uint32, error) {
	count := len(ids) + len(table)
	place, ok := s.take(count)
	if !ok {
		s.full, s.freed = true, false

		return 0, fmt.Errorf("map %s, %d of %d in use, none has room for %d: %w",
			maps.NameSlots, s.used, s.array.Len(), count, maps.ErrFull)
	}
	err := s.set(place.base, ids)
	if err == nil {
		err = s.set(place.base+uint32(len(ids)), table)
	}
	if err != nil {
		s.spans.free(place)

		return 0, fmt.Errorf("map %s: %w", maps.NameSlots, err)
	}

	return place.base, nil
}

// set writes ids to slots from base on.
func (s *slots) set(base uint32, ids []uint32) error {
	for i, id := range ids {
		if err := s.array.Set(base+uint32(i), id); err != nil {
			return err
		}
		s.writes.Puts++
	}

	return nil
}

// remove gives the slots of an extent back. They keep what they hold.
func (s *slots) remove(base uint32, count int) {
	s.free(span{base, uint32(count)})
	s.freed = true
}

// repair writes a slot that somebody else wrote to.
func (s *slots) repair(slot, id uint32) error {
	s.writes.Puts++

	return s.array.Set(slot, id)
}
