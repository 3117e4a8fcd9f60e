package reconcile

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	stdmaps "maps"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// adoption is the state of New while it reads the maps.
type adoption struct {
	*Reconciler
	ports   map[uint32]*port  // by id
	invalid map[uint32]string // why a pool is invalid, by id
}

// adopt reads the maps. Everything in them that is consistent belongs to a Service then, if only to
// the nameless one. Programs that started under the last agent may still read what nothing leads
// to, so it is freed after a grace period.
func (r *Reconciler) adopt() error {
	a := adoption{r, make(map[uint32]*port), make(map[uint32]string)}
	r.frontends.adopt()
	r.pools.adopt()
	r.slots.adopt()
	r.backends.adopt()
	if err := r.loads.Reserve(len(r.backends.have)); err != nil {
		return err
	}
	r.poolsByID = make([]*pool, len(r.pools.have))
	for e, err := range r.servicePorts.All() {
		if err != nil {
			return err
		}
		namespace, name, port := e.Value.Parts()
		p := a.adoptPort(e.Key, lb.ServiceName{Namespace: namespace, Name: name}, portName{
			name: port, protocol: lb.Protocol(e.Value.Proto), family: lb.Family(e.Value.Family),
		})
		p.named = true
		r.servicePorts.used++
	}
	for i, v := range r.backends.have {
		place := uint32(i)
		r.backendPlaces.setGeneration(place, uint8(v.Reserved)) // a free place holds its next generation
		if r.isBackend(place) {
			r.backendPlaces.setGeneration(place, uint8(maps.Generation(v.Id)))
			p := a.portOf(v.ServicePortId)
			p.backends = append(p.backends, v.Id)
		} else if place != 0 && v.Id == 0 && maps.Index(v.ServicePortId) != 0 {
			r.adoptDeparted(place, v)
		}
	}
	if err := r.sourceRanges.adopt(); err != nil {
		return err
	}
	for key := range r.sourceRanges.have {
		p := a.portOf(key.ServicePortId)
		p.ranges = append(p.ranges, key)
	}
	if err := r.frontendIDs.adopt(); err != nil {
		return err
	}
	for _, key := range slices.SortedFunc(stdmaps.Keys(r.frontendIDs.have), compareKeys) { // of two pools that overlap, the first is valid
		a.adoptFrontend(key, r.frontendIDs.have[key])
	}
	for _, adopt := range []func() error{r.addrs.adopt, r.devices.adopt, r.serviceCIDRs.adopt, r.localCIDRs.adopt, r.optedOut.adopt} {
		if err := adopt(); err != nil {
			return err
		}
	}
	for _, svc := range r.services {
		slices.SortFunc(svc.ports, func(a, b *port) int { return cmp.Compare(a.id, b.id) })
		for _, p := range svc.ports {
			slices.SortFunc(p.backends, func(a, b uint32) int {
				return cmp.Or(compareEndpoints(r.endpoint(a), r.endpoint(b)), cmp.Compare(a, b))
			})
			slices.SortFunc(p.ranges, func(a, b maps.SourceRangeKey) int {
				return cmp.Or(bytes.Compare(a.Addr.Bytes[:], b.Addr.Bytes[:]), cmp.Compare(a.PrefixLen, b.PrefixLen))
			})
		}
	}
	a.freeUnused()

	return nil
}

// detachBroken makes inconsistent frontends lead to pool 0, which has no backends, because what they
// lead to now is about to be reused. Then it queues the release of unused places for a grace period.
func (r *Reconciler) detachBroken() error {
	for key := range r.broken {
		id := r.frontendIDs.have[key]
		f := r.frontends.at(id)
		if f.Key != key {
			continue // programs ignore it, too
		}
		f.PoolId = 0
		if err := r.frontends.put(id, f); err != nil {
			return err
		}
	}
	r.afterGrace(r.freeAdopted)
	r.freeAdopted = nil

	return nil
}

func (r *adoption) adoptPort(id uint32, of lb.ServiceName, name portName) *port {
	svc := r.service(of)
	svc.adopted = true
	r.portPlaces.setGeneration(maps.Index(id), uint8(maps.Generation(id)))

	r.ports[id] = &port{svc: svc, portName: name, id: id}
	svc.ports = append(svc.ports, r.ports[id])

	return r.ports[id]
}

// portOf returns the port with this id. A port without a name belongs to the nameless Service.
func (r *adoption) portOf(id uint32) *port {
	if p := r.ports[id]; p != nil {
		return p
	}

	return r.adoptPort(id, nameless, portName{name: fmt.Sprintf("id %d", id)})
}

// isBackend reports whether the backend at a place exists and has an id of that place.
func (r *Reconciler) isBackend(place uint32) bool {
	v := r.backends.at(place)

	return place != 0 && v.Id != 0 && maps.Index(v.Id) == place && maps.Index(v.ServicePortId) != 0
}

// adoptFrontend records a frontend, with its pool or why it is inconsistent.
func (r *adoption) adoptFrontend(key maps.FrontendKey, id uint32) {
	var pl *pool
	switch f := r.frontends.at(id); {
	case f == (maps.Frontend{}):
		r.broken[key] = fmt.Sprintf("frontend %d does not exist", id)
	case f.Key != key:
		r.broken[key] = fmt.Sprintf("frontend %d is %s", id, modelKey(f.Key))
	default:
		if pl = r.adoptPool(f.PoolId); pl == nil {
			r.broken[key] = r.invalid[f.PoolId]
		}
	}
	if pl == nil {
		svc := r.service(nameless)
		svc.adopted = true
		svc.retire(key)

		return
	}
	pl.frontends++
	r.addrs.addFrontend(key)
	pl.port.svc.retire(key)
}

// adoptPool returns the pool with this id, or nil after recording why it is invalid.
func (r *adoption) adoptPool(id uint32) *pool {
	if r.invalid[id] != "" {
		return nil
	}
	if int(id) < len(r.poolsByID) && r.poolsByID[id] != nil {
		return r.poolsByID[id]
	}
	v := r.pools.at(id)
	if id == 0 || maps.Index(v.ServicePortId) == 0 {
		r.invalid[id] = fmt.Sprintf("pool %d does not exist", id)

		return nil
	}
	pl := &pool{
		id: id, port: r.portOf(v.ServicePortId), unverified: v.TableSize > 0,
		slots: span{v.SlotBase, v.SlotCount}, table: span{v.TableBase, v.TableSize},
	}
	if r.invalid[id] = r.checkPool(pl, v); r.invalid[id] != "" {
		return nil
	}
	r.poolsByID[id] = pl
	pl.port.pools = append(pl.port.pools, pl)

	return pl
}

// checkPool allocates the slots of a pool, or returns why it is invalid.
func (r *adoption) checkPool(pl *pool, v maps.Pool) string {
	for _, s := range []span{pl.slots, pl.table} {
		if s.count > 0 && (s.base == 0 || s.end() > uint64(len(r.slots.have))) {
			return fmt.Sprintf("slots %s do not exist", s)
		}
	}
	members, _ := r.members(pl)
	for i, id := range members {
		slot := v.SlotBase + uint32(i)
		b := r.backends.at(maps.Index(id))
		switch {
		case !r.isBackend(maps.Index(id)) || b.Id != id:
			return fmt.Sprintf("slot %d: backend %d does not exist", slot, id)
		case b.ServicePortId != v.ServicePortId:
			return fmt.Sprintf("slot %d: backend %d belongs to id %d, not %d", slot, id, b.ServicePortId, v.ServicePortId)
		case i > 0 && id < members[i-1]:
			return fmt.Sprintf("slot %d: backend %d is out of order", slot, id)
		}
	}
	for i := range v.TableSize {
		if slot := v.TableBase + i; !holds(members, r.slots.at(slot)) {
			return fmt.Sprintf("slot %d: backend %d is in the table only", slot, r.slots.at(slot))
		}
	}
	if maps.Hashes(v.Algorithm) && v.SlotCount > 0 && v.TableSize == 0 {
		return fmt.Sprintf("slots %s have no table for %s", pl.slots, AlgorithmText(v.Algorithm))
	}
	if !r.spans.mark(pl.slots) {
		return fmt.Sprintf("slots %s are another pool's too", pl.slots)
	}
	if !r.spans.mark(pl.table) {
		r.spans.give(pl.slots)

		return fmt.Sprintf("slots %s are another pool's too", pl.table)
	}

	return ""
}

// freeUnused allocates the places in use, and prepares freeAdopted for the others.
func (r *adoption) freeUnused() {
	frontends := r.frontendPlaces.adopt(len(r.frontends.have), func(place uint32) bool {
		key := r.frontends.at(place).Key
		id, there := r.frontendIDs.have[key]

		return there && id == place
	})
	pools := r.poolPlaces.adopt(len(r.pools.have), func(place uint32) bool { return r.poolsByID[place] != nil })
	backends := r.backendPlaces.adopt(len(r.backends.have), r.isBackend)
	left := make(map[uint32]*departure)
	for _, of := range r.departed.ids {
		left[maps.Index(of.id)] = of
	}
	used := make(map[uint32]bool)
	portEnd := 1
	for id := range r.ports {
		used[maps.Index(id)] = true
		portEnd = max(portEnd, int(maps.Index(id))+1)
	}
	ports := r.portPlaces.adopt(portEnd, func(place uint32) bool { return used[place] })
	holes := r.spans.below(uint32(len(r.slots.have)))

	if len(r.broken)+len(frontends)+len(pools)+len(backends)+len(ports)+len(holes) == 0 && !r.addrs.adopted {
		return
	}
	r.freeAdopted = func() error {
		var errs []error
		for _, place := range frontends {
			errs = append(errs, r.frontends.clear(place, maps.Frontend{}))
		}
		for _, place := range pools {
			errs = append(errs, r.pools.clear(place, maps.Pool{}))
		}
		backends := slices.DeleteFunc(slices.Clone(backends), func(place uint32) bool { return left[place] != nil && left[place].back })
		for _, place := range backends {
			if left[place] == nil {
				errs = append(errs, r.backends.clear(place, maps.Backend{Reserved: uint16(r.backendPlaces.generation(place))}))
			}
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
		for _, place := range ports { // their past generations are not known
			r.portPlaces.setGeneration(place, uint8(r.now().Unix()))
		}
		r.frontendPlaces.give(frontends...)
		r.poolPlaces.give(pools...)
		r.backendPlaces.give(backends...)
		for _, place := range backends {
			if left[place] != nil {
				left[place].freed = true
			}
		}
		r.portPlaces.give(ports...)
		for _, hole := range holes {
			r.spans.give(hole)
		}
		r.addrs.endAdoption()

		return nil
	}
}

func compareKeys(a, b maps.FrontendKey) int {
	return cmp.Or(
		bytes.Compare(a.Addr.Bytes[:], b.Addr.Bytes[:]),
		cmp.Compare(maps.Port(a.Port), maps.Port(b.Port)),
		cmp.Compare(a.Proto, b.Proto),
		cmp.Compare(a.Scope, b.Scope),
	)
}
