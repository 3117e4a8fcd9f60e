package reconcile

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// adopt takes over what the maps hold. Everything in them belongs to a Service
// afterwards, if need be to the nameless one.
func (r *Reconciler) adopt() error {
	backends := make(map[uint32]uint32) // id → frontend id
	for _, step := range []func() error{
		r.adoptNames,
		func() error { return r.adoptBackends(backends) },
		r.adoptRanges,
		func() error { return r.adoptFrontends(backends) },
		r.addrs.adopt,
		r.devices.adopt,
		r.serviceCIDRs.adopt,
		r.localCIDRs.adopt,
	} {
		if err := step(); err != nil {
			return fmt.Errorf("adopt: %w", err)
		}
	}
	for _, svc := range r.services {
		slices.SortFunc(svc.ports, func(a, b *port) int { return cmp.Compare(a.id, b.id) })
		for _, p := range svc.ports {
			p.sort()
		}
	}

	return nil
}

func (r *Reconciler) adoptNames() error {
	for e, err := range r.tables.servicePorts.All() {
		if err != nil {
			return err
		}
		namespace, name, portName := e.Value.Parts()
		svc := r.adoptService(lb.ServiceName{Namespace: namespace, Name: name})
		r.frontendIDs.adopt(e.Key)
		r.addPort(&port{
			svc: svc, name: portName,
			protocol: lb.Protocol(e.Value.Proto), family: lb.Family(e.Value.Family),
			id: e.Key, named: true,
		})
		r.tables.servicePorts.used++
	}

	return nil
}

func (r *Reconciler) adoptService(name lb.ServiceName) *service {
	svc := r.service(name)
	svc.adopted = true

	return svc
}

// adoptPort returns the port with this frontend id. One without a name belongs
// to the nameless Service.
func (r *Reconciler) adoptPort(id uint32) *port {
	if p := r.ports[id]; p != nil {
		return p
	}
	r.frontendIDs.adopt(id)

	return r.addPort(&port{svc: r.adoptService(nameless), name: fmt.Sprintf("id %d", id), id: id})
}

func (r *Reconciler) adoptBackends(frontendOf map[uint32]uint32) error {
	for e, err := range r.tables.backends.All() {
		if err != nil {
			return err
		}
		id, v := e.Key, e.Value
		frontendOf[id] = v.FrontendId
		r.backendIDs.adopt(id)
		p := r.adoptPort(v.FrontendId)
		p.backends = append(p.backends, backend{
			addr: v.Addr, port: v.AddrPort().Port(), id: id,
			flags: v.Flags, have: v.Flags, written: true,
		})
		r.tables.backends.used++
	}

	return nil
}

func (p *port) sort() {
	slices.SortFunc(p.backends, func(a, b backend) int {
		return cmp.Or(a.compare(b.addr, b.port), cmp.Compare(a.id, b.id))
	})
	slices.SortFunc(p.ranges, func(a, b sourceRange) int {
		return cmp.Or(bytes.Compare(a.key.Addr.Bytes[:], b.key.Addr.Bytes[:]), cmp.Compare(a.key.PrefixLen, b.key.PrefixLen))
	})
}

func (r *Reconciler) adoptRanges() error {
	for e, err := range r.tables.sourceRanges.All() {
		if err != nil {
			return err
		}
		p := r.adoptPort(e.Key.FrontendId)
		p.ranges = append(p.ranges, sourceRange{key: e.Key, written: true})
		r.tables.sourceRanges.used++
	}

	return nil
}

func (r *Reconciler) adoptFrontends(backends map[uint32]uint32) error {
	var entries []maps.Entry[maps.FrontendKey, maps.Frontend]
	for e, err := range r.tables.frontends.All() {
		if err != nil {
			return err
		}
		entries = append(entries, e)
	}
	// In a fixed order: of two extents that overlap, the first is believed.
	slices.SortFunc(entries, func(a, b maps.Entry[maps.FrontendKey, maps.Frontend]) int {
		return compareKeys(a.Key, b.Key)
	})
	for _, e := range entries {
		r.tables.frontends.used++
		r.adoptFrontend(e.Key, e.Value, backends)
	}

	return nil
}

// adoptFrontend believes one frontend, if it leads to where frontends lead.
func (r *Reconciler) adoptFrontend(key maps.FrontendKey, v maps.Frontend, backends map[uint32]uint32) {
	p := r.adoptPort(v.Id)
	e, why := r.adoptExtent(p, v, backends)
	f := r.frontend(key)
	r.lead(f, p, e, v)
	r.leave(f)
	if why != "" {
		r.broken[key] = why
	}
}

// adoptExtent returns the extent of p that v leads to, or why it is none.
func (r *Reconciler) adoptExtent(p *port, v maps.Frontend, backends map[uint32]uint32) (*extent, string) {
	if v.SlotCount == 0 {
		return nil, ""
	}
	for _, e := range p.extents {
		if e.base == v.SlotBase && len(e.ids) == int(v.SlotCount) && len(e.table) == int(v.TableSize) {
			return e, ""
		}
	}
	end := uint64(v.SlotBase) + uint64(v.SlotCount) + uint64(v.TableSize)
	if v.SlotBase == 0 || end > uint64(r.tables.slots.array.Len()) {
		return nil, fmt.Sprintf("slots %s do not exist", slotsText(v))
	}
	e, why := r.readExtent(v, backends)
	if why != "" {
		return nil, why
	}
	if !r.tables.slots.mark(span{v.SlotBase, v.SlotCount + v.TableSize}) {
		return nil, fmt.Sprintf("slots %s are another frontend's too", slotsText(v))
	}
	p.extents = append(p.extents, e)

	return e, ""
}

// readExtent reads the extent that v leads to, or returns why it is none.
func (r *Reconciler) readExtent(v maps.Frontend, backends map[uint32]uint32) (*extent, string) {
	ids, why := r.readBackends(v, backends)
	if why != "" {
		return nil, why
	}
	e := &extent{ids: ids, base: v.SlotBase, foreign: v.TableSize > 0}
	switch {
	case v.TableSize > 0:
		e.table, why = r.readTable(v, e)
	case Hashes(v.Algorithm):
		why = fmt.Sprintf("slots %s have no table for %s", slotsText(v), AlgorithmText(v.Algorithm))
	}

	return e, why
}

// readTable returns the table that v has behind its backends, or why it has none.
func (r *Reconciler) readTable(v maps.Frontend, e *extent) ([]uint32, string) {
	base := v.SlotBase + v.SlotCount
	table := make([]uint32, v.TableSize)
	for i := range table {
		slot := base + uint32(i)
		id, err := r.tables.slots.array.Get(slot)
		if err != nil {
			return nil, err.Error()
		}
		if !e.holds(id) {
			return nil, fmt.Sprintf("slot %d: backend %d is in the table only", slot, id)
		}
		table[i] = id
	}

	return table, ""
}

// readBackends returns the backends that v leads to, or why it does not.
func (r *Reconciler) readBackends(v maps.Frontend, backends map[uint32]uint32) ([]uint32, string) {
	ids := make([]uint32, 0, min(v.SlotCount, 1<<16))
	for i := v.SlotBase; i < v.SlotBase+v.SlotCount; i++ {
		id, err := r.tables.slots.array.Get(i)
		if err != nil {
			return nil, err.Error()
		}
		owner, ok := backends[id]
		switch {
		case !ok:
			return nil, fmt.Sprintf("slot %d: backend %d does not exist", i, id)
		case owner != v.Id:
			return nil, fmt.Sprintf("slot %d: backend %d belongs to id %d, not %d", i, id, owner, v.Id)
		case len(ids) > 0 && id <= ids[len(ids)-1]:
			return nil, fmt.Sprintf("slot %d: backend %d is out of order", i, id)
		}
		ids = append(ids, id)
	}

	return ids, ""
}

func compareKeys(a, b maps.FrontendKey) int {
	return cmp.Or(
		bytes.Compare(a.Addr.Bytes[:], b.Addr.Bytes[:]),
		cmp.Compare(maps.Port(a.Port), maps.Port(b.Port)),
		cmp.Compare(a.Proto, b.Proto),
		cmp.Compare(a.Scope, b.Scope),
	)
}
