package reconcile

import (
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// retirement is the queue of actions that wait for a grace period: what was taken out of the maps
// may be reused only when every program has ended that ran at that time. Such an action may take
// more out of the maps, which waits for the next grace period.
//
//	frontend key deleted  -> its place is cleared and free; its address drains
//	pool without frontend -> its id and slots are free; backends in no other pool are cleared
//	backend cleared       -> its place is free
//	name deleted          -> the id of the service port is free
type retirement struct {
	queue []func() error
	runs  bool   // a grace period is running
	begun int    // how many of the first it covers
	over  int    // how many of the first may run
	count uint32 // of pools that were retired
}

// afterGrace queues do for the end of a grace period that begins after this call. If do fails, it is
// queued again.
func (r *Reconciler) afterGrace(do func() error) {
	r.retirement.queue = append(r.retirement.queue, do)
}

// Retired reports whether something was taken out of the maps for which no grace period has begun
// yet.
func (r *Reconciler) Retired() bool {
	q := &r.retirement

	return len(q.queue) > max(q.begun, q.over)
}

// InGrace reports whether a grace period is running.
func (r *Reconciler) InGrace() bool { return r.retirement.runs }

// BeginGrace begins a grace period for all that was taken out of the maps so far. The caller then
// waits until every program has ended that is running now, and calls EndGrace. There is one grace
// period at a time.
func (r *Reconciler) BeginGrace() {
	if q := &r.retirement; !q.runs {
		q.runs, q.begun = true, len(q.queue)
	}
}

// EndGrace ends the grace period: what was taken out of the maps before it may be reused. Apply runs
// the queued actions, and Next returns at once if there are any.
func (r *Reconciler) EndGrace() {
	q := &r.retirement
	q.over, q.begun, q.runs = max(q.over, q.begun), 0, false
}

// runAfterGrace runs the actions of which the grace period is over. They may take half of the
// budget of an Apply; the rest is for changes.
func (r *Reconciler) runAfterGrace() {
	q := &r.retirement
	for q.over > 0 && r.left > r.slice*costOperation/2 {
		do := q.queue[0]
		q.queue[0] = nil
		q.queue = q.queue[1:]
		q.over--
		q.begun = max(q.begun-1, 0)
		r.spend(costOperation)
		var err error
		if failed := guard(func() { err = do() }); failed != nil { // the place that do would have freed stays unused
			r.panics = append(r.panics, fmt.Errorf("after a grace period: %w", failed))
		} else if err != nil {
			r.afterGrace(do)
		}
	}
	if len(q.queue) == 0 {
		q.queue = nil
	}
}

// retireFrontends deletes the frontends in the maps that no Service claims any more, catch-alls
// first. Those that cannot be deleted stay queued.
func (r *Reconciler) retireFrontends(svc *service) {
	for i := range svc.retiring {
		queue, failed := &svc.retiring[i], []maps.FrontendKey(nil)
		defer func() { *queue = append(failed, *queue...) }()
		for len(*queue) > 0 {
			r.pay(costLook)
			key := (*queue)[0]
			*queue, failed = (*queue)[1:], append(failed, key)
			if err := r.retireFrontend(svc, key); err != nil {
				svc.failFrontend(key, err)
			} else {
				failed = failed[:len(failed)-1]
			}
		}
	}
}

// retireFrontend deletes a frontend, unless a Service claims it again or it leads to another Service
// by now. An owner that had to wait, because svc was adopted with the frontend, is due then.
func (r *Reconciler) retireFrontend(svc *service, key maps.FrontendKey) error {
	if owner := r.claims.Owner(key); owner != nil {
		if to := r.leadsTo(key); owner.Name != svc.name && (to == nil || to.port.svc == svc) {
			r.markDirty(r.services[owner.Name])
		}

		return nil
	}
	if _, broken := r.broken[key]; broken {
		return r.removeBroken(key)
	}
	pl := r.leadsTo(key)
	if pl == nil || pl.port.svc != svc {
		return nil
	}
	id := r.frontendIDs.have[key]
	if err := r.frontendIDs.unset(key); err != nil {
		return err
	}
	p := pl.port
	r.releasePool(pl)
	r.freeFrontend(id, func() {
		r.addrs.removeFrontend(key, svc.name)
		r.frontendGone(key, p)
	})

	return nil
}

// freeFrontend frees the place of a frontend to which no key leads any more, after a grace period,
// and calls then.
func (r *Reconciler) freeFrontend(id uint32, then func()) {
	r.afterGrace(func() error {
		if err := r.frontends.clear(id, maps.Frontend{}); err != nil {
			return err
		}
		r.frontendPlaces.give(id)
		then()

		return nil
	})
}

// removeBroken deletes an adopted frontend that leads to nowhere.
func (r *Reconciler) removeBroken(key maps.FrontendKey) error {
	id := r.frontendIDs.have[key]
	if err := r.frontendIDs.unset(key); err != nil {
		return err
	}
	delete(r.broken, key)
	if r.frontends.at(id).Key == key {
		r.freeFrontend(id, func() {})
	}

	return nil
}

// frontendGone reports a UDP frontend that no longer leads to p: sockets that are connected through
// it must be closed.
func (r *Reconciler) frontendGone(key maps.FrontendKey, p *port) {
	if to := r.leadsTo(key); p.mayBeUDP() && (to == nil || to.port != p) {
		r.gone.Frontends = append(r.gone.Frontends, GoneFrontend{ServicePortID: p.id, Key: modelKey(key)})
	}
}

// releasePool records that one frontend less leads to a pool.
func (r *Reconciler) releasePool(pl *pool) {
	if pl.frontends--; pl.frontends == 0 {
		r.retireLater(pl.port.svc)
	}
}

// retirePool frees the id and the slots of a pool to which no frontend leads, after a grace period
// and if none leads to it then. Backends that are in no other pool can be retired next.
func (r *Reconciler) retirePool(pl *pool) {
	r.retirement.count = max(r.retirement.count+1, 1) // zero is none
	retired := r.retirement.count
	pl.retired = retired
	r.afterGrace(func() error {
		if pl.retired != retired {
			return nil
		}
		if err := r.pools.clear(pl.id, maps.Pool{}); err != nil {
			return err
		}
		r.poolsByID[pl.id] = nil
		r.poolPlaces.give(pl.id)
		r.spans.give(pl.slots)
		r.spans.give(pl.table)
		r.spans.freed++
		p := pl.port
		p.pools = slices.DeleteFunc(p.pools, func(other *pool) bool { return other == pl })
		r.retireLater(p.svc)

		return nil
	})
}

// holds reports whether an id is among ids, which ascend.
func holds(ids []uint32, id uint32) bool {
	_, ok := slices.BinarySearch(ids, id)

	return ok
}

// sweepPorts retires what the ports of svc do not need any more.
func (r *Reconciler) sweepPorts(svc *service) {
	kept, i := 0, 0
	defer func() { svc.ports = slices.Delete(svc.ports, kept, i) }()
	for ; i < len(svc.ports); i++ {
		r.pay(costLook)
		if !r.sweepPort(svc.ports[i]) {
			svc.ports[kept], svc.ports[i] = svc.ports[i], svc.ports[kept]
			kept++
		}
	}
}

// sweepPort retires what p does not need any more: pools to which no frontend leads, backends that
// are neither in a pool nor planned, source ranges, and finally its name. It reports whether p itself
// is gone.
func (r *Reconciler) sweepPort(p *port) (gone bool) {
	for _, pl := range p.pools {
		if pl.frontends == 0 && pl.retired == 0 {
			r.retirePool(pl)
		}
	}
	r.sweepBackends(p)
	r.sweepRanges(p)
	if len(p.pools)+len(p.backends)+len(p.ranges) > 0 || p.owned {
		return false
	}
	if p.named {
		if err := r.servicePorts.remove(p.id, true); err != nil {
			p.svc.fail("port "+p.String(), err)

			return false
		}
		p.named = false
	}
	if err := r.counts.End(p.id); err != nil {
		p.svc.fail("port "+p.String(), err)

		return false
	}
	if place := maps.Index(p.id); place != 0 {
		r.afterGrace(func() error {
			r.portPlaces.give(place)

			return nil
		})
	}

	return true
}

// sweepBackends clears the ids of p's backends that are in no pool and not planned: a program that
// remembers such an id finds that the backend is gone, unless it comes back. Their places are free after a
// grace period.
func (r *Reconciler) sweepBackends(p *port) {
	kept, rest := p.backends[:p.plannedBackends], p.backends[p.plannedBackends:]
	defer func() { p.backends = append(kept, rest...) }()
	for ; len(rest) > 0; rest = rest[1:] {
		r.pay(len(p.pools) * costSlot)
		id := rest[0]
		pooled := slices.ContainsFunc(p.pools, func(pl *pool) bool {
			members, _ := r.members(pl)

			return holds(members, id)
		})
		if pooled {
			kept = append(kept, id)

			continue
		}
		place := maps.Index(id)
		v := r.backends.at(place)
		cleared := v
		cleared.Id, cleared.Reserved = 0, uint16(maps.Generation(id))+1
		if err := r.backends.clear(place, cleared); err != nil {
			p.svc.fail("backend "+v.AddrPort().String(), err)
			kept = append(kept, id)

			continue
		}
		if p.mayBeUDP() {
			r.gone.Backends = append(r.gone.Backends, GoneBackend{ServicePortID: p.id, BackendID: id, Addr: v.AddrPort()})
		}
		r.freeBackend(backendKey{p.id, endpoint{v.Addr, maps.Port(v.Port)}}, id)
	}
}

// sweepRanges deletes source ranges of p that are not planned. Where planned ranges replace them
// they are deleted at once, because their clients must not connect any more. Where a restriction ends
// they stay until no program can have read a pool that has it.
func (r *Reconciler) sweepRanges(p *port) {
	restricted := r.restricted(p)
	if !restricted && !p.owned {
		p.plannedRanges = 0
	}
	if restricted && p.plannedRanges == 0 {
		return
	}
	kept, rest := p.ranges[:p.plannedRanges], p.ranges[p.plannedRanges:]
	defer func() { p.ranges = append(kept, rest...) }()
	for ; len(rest) > 0; rest = rest[1:] {
		r.pay(0)
		if err := r.sourceRanges.unset(rest[0]); err != nil {
			p.svc.fail("source range "+rest[0].Prefix().String(), err)
			kept = append(kept, rest[0])
		}
	}
}

// takeOut takes backends that are not planned any more out of the existing pools of a port: there
// is no room for new pools, and new flows must not go to a backend that is gone.
func (r *Reconciler) takeOut(want *plannedPort) {
	p := want.have
	pooled := make(map[uint32]bool, len(want.backends))
	for i := range want.backends {
		if b := &want.backends[i]; b.pooled && b.id != 0 {
			pooled[b.id] = true
		}
	}
	for _, pl := range p.pools {
		members, _ := r.members(pl)
		if pl.frontends == 0 || !slices.ContainsFunc(members, func(id uint32) bool { return !pooled[id] }) {
			continue
		}
		if err := r.shrinkPool(pl, pooled); err != nil {
			p.svc.fail("pool of "+p.String(), err)
		}
		v := r.pools.at(pl.id)
		r.afterGrace(func() error {
			r.spans.give(span{pl.slots.base + v.SlotCount, pl.slots.count - v.SlotCount})
			pl.slots.count = v.SlotCount
			if v.TableSize == 0 {
				r.spans.give(pl.table)
				pl.table = span{}
			}
			r.spans.freed++

			return nil
		})
	}
}

// shrinkPool takes the backends out of a pool that are not in stay. After every store the pool is
// sorted and contains no backends that it did not contain before.
func (r *Reconciler) shrinkPool(pl *pool, stay map[uint32]bool) error {
	members, v := r.members(pl)
	old := slices.Clone(members)
	kept := slices.DeleteFunc(slices.Clone(members), func(id uint32) bool { return !stay[id] })
	pl.unverified = v.TableSize > 0
	if len(kept) == 0 {
		v.SlotCount, v.TableSize = 0, 0

		return r.pools.put(pl.id, v)
	}
	for i := range v.TableSize {
		if slot := v.TableBase + i; !stay[r.slots.at(slot)] {
			if err := r.slots.put(slot, kept[int(i)%len(kept)]); err != nil {
				return err
			}
		}
	}
	// First the new end is set after the last backend that stays. Then each slot, from the last to
	// the first, gets the backend that it will have or, beyond the final end, the last one.
	count := len(old)
	for !stay[old[count-1]] {
		count--
	}
	v.SlotCount = uint32(count)
	if err := r.pools.put(pl.id, v); err != nil {
		return err
	}
	for i := count - 1; i >= 0; i-- {
		if err := r.slots.put(v.SlotBase+uint32(i), kept[min(i, len(kept)-1)]); err != nil {
			return err
		}
	}
	v.SlotCount = uint32(len(kept))

	return r.pools.put(pl.id, v)
}
