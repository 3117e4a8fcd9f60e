package reconcile

import (
	"fmt"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// step is how far the plan of a Service is carried out. Publishing takes the steps in this
// order.
type step uint8

const (
	enteringClaims      step = iota // the frontends of the plan are claimed
	detachingPorts                  // ports in the maps are detached from the former plan
	matchingPorts                   // planned ports and backends are matched with those in the maps
	withdrawingClaims               // the claims of the former plan are withdrawn
	publishingBackends              // from here on, what frontends will lead to: ids of ports, and backends
	publishingRanges                // source ranges, before the pools that have them
	publishingPools                 // to which no frontend leads yet
	publishingFrontends             // frontends lead to the pools
	published
)

// progress is where publishing continues after a slice ended.
type progress struct {
	step  step
	port  int   // index, in steps that go through ports
	item  int   // index in the port, or in the step
	draft *pool // the pool that is being written
}

// eachPort calls do for the ports of the plan. Do returns false if the budget is spent before it has
// done all; then so does eachPort, and the next call continues there.
func (svc *service) eachPort(do func(want *plannedPort) bool) bool {
	for ; svc.port < len(svc.plan.ports); svc.port, svc.item = svc.port+1, 0 {
		if !do(&svc.plan.ports[svc.port]) {
			return false
		}
	}

	return true
}

// eachItem calls do for the items 0 to n-1 of a step, or of a port in a step. Each spends cost. It
// returns false if the budget is spent before the last one; the next call continues there.
func (r *Reconciler) eachItem(svc *service, n, cost int, do func(i int)) bool {
	for ; svc.item < n; svc.item++ {
		if !r.affords(cost) {
			return false
		}
		do(svc.item)
	}

	return true
}

// setPlan replaces the plan of svc, after the claims of the current plan have been entered. It
// enters as many claims as the slice allows that all calls of Set between two Applies share.
func (r *Reconciler) setPlan(svc *service, next *plan) {
	svc.ensureWork()
	if svc.step < publishingBackends {
		svc.next = next
	} else {
		svc.startPlan(next)
	}
	r.markDirty(svc)
	if err := svc.guard(func() { r.publish(svc, publishingBackends) }); err != nil {
		r.panics = append(r.panics, svc.errorOf([]Failure{{What: "plan", Err: err}}))
	}
}

// startPlan replaces the plan of svc. The claims of the new plan are entered before those of the
// former are withdrawn, so that no other Service owns a frontend in between.
func (svc *service) startPlan(next *plan) {
	svc.former, svc.plan, svc.next = svc.plan, next, nil
	svc.progress = progress{}
}

// publish carries out the plan of svc up to a step. Nothing is written until all claims are
// entered. Writes go from the bottom up, so that at any moment every frontend leads to backends
// that exist. Failures are recorded, and publishing continues with the rest. It returns false if
// the budget of this Apply is spent; the next call continues where it stopped.
func (r *Reconciler) publish(svc *service, until step) bool {
	for svc.step < until {
		done := false
		switch svc.step {
		case enteringClaims:
			done = r.enterClaims(svc)
		case detachingPorts:
			done = r.detachPorts(svc)
		case matchingPorts:
			done = r.matchPorts(svc)
		case withdrawingClaims:
			done = r.withdrawClaims(svc)
		case publishingBackends:
			done = svc.eachPort(func(want *plannedPort) bool { return r.publishBackends(svc, want) })
		case publishingRanges:
			done = svc.eachPort(func(want *plannedPort) bool { return r.publishRanges(svc, want) })
		case publishingPools:
			done = svc.eachPort(func(want *plannedPort) bool { return r.publishPools(svc, want) })
		case publishingFrontends:
			done = r.publishFrontends(svc)
		}
		if !done {
			return false
		}
		svc.progress = progress{step: svc.step + 1}
		if svc.step == publishingBackends && svc.next != nil {
			svc.startPlan(svc.next)
		}
	}

	return true
}

// enterClaims claims the frontends of the plan. Services that gain or lose a frontend by that are
// due. A plan with the same claims as the former one takes them over.
func (r *Reconciler) enterClaims(svc *service) bool {
	if former := svc.former; svc.item == 0 && former.sameClaims(svc.plan) {
		svc.plan.claimant, svc.former = former.claimant, nil
		for i := range former.frontends {
			if former.frontends[i].owned {
				r.setOwned(svc.plan, i, true)
			}
		}
		r.spend(len(former.frontends) * costSlot)

		return true
	}

	return r.eachItem(svc, len(svc.plan.frontends), costClaim, func(i int) {
		f := &svc.plan.frontends[i]
		r.claims.Add(svc.plan.claimant, i, f.key, lb.Kind(f.kind))
	})
}

// moved records that a Service owns a frontend that it claims, or has lost it to another one. The
// Service is due.
func (r *Reconciler) moved(s *lb.Claimant, number int, owns bool) {
	svc := r.services[s.Name]
	of := svc.plan
	if svc.work != nil && svc.former != nil && svc.former.claimant == s {
		of = svc.former
	}
	r.setOwned(of, number, owns)
	if svc.work == nil || svc.step >= publishingBackends {
		r.markDirty(svc)
	}
}

// setOwned records in a plan whether the Service owns a frontend.
func (r *Reconciler) setOwned(of *plan, number int, owns bool) {
	f := &of.frontends[number]
	if f.owned == owns {
		return
	}
	f.owned = owns
	if of.ports == nil {
		return
	}
	more := 1
	if !owns {
		more = -1
	}
	p := &of.ports[f.port]
	p.owned += more
	p.pools[f.pool].owned += more
	if p.owned == 0 && p.have != nil {
		r.sweepLater(p.have)
	}
}

// detachPorts detaches the ports of svc in the maps from the former plan. From then on svc is no
// longer adopted, and its plan is complete.
func (r *Reconciler) detachPorts(svc *service) bool {
	svc.adopted = false
	if svc.isCompact() {
		svc.plan.rebuild()
		r.spend(svc.plan.rows() * costClaim)
	}

	return r.eachItem(svc, len(svc.ports), costLook, func(i int) {
		svc.ports[i].planned = nil
		r.sweepLater(svc.ports[i])
	})
}

// matchPorts finds the ports of the plan in the maps, and their backends. Of two ports with the
// same name the first counts.
func (r *Reconciler) matchPorts(svc *service) bool {
	byName := make(map[portName]*port, len(svc.ports))
	for _, p := range slices.Backward(svc.ports) {
		byName[p.portName] = p
	}
	r.spend(len(svc.ports) * costSlot)

	return svc.eachPort(func(want *plannedPort) bool {
		if !r.affords(costLook) {
			return false
		}
		p := byName[want.portName]
		if p == nil {
			return true
		}
		want.have, p.planned = p, want
		r.arrange(p)
		r.spend((len(p.backends) + len(want.backends)) * costSlot)
		have := p.backends
		for i := range want.backends {
			b := &want.backends[i]
			for len(have) > 0 && compareEndpoints(r.endpoint(have[0]), b.endpoint) < 0 {
				have = have[1:]
			}
			if len(have) > 0 && r.endpoint(have[0]) == b.endpoint {
				b.id = have[0]
			}
		}

		return true
	})
}

// withdrawClaims withdraws the claims of the former plan. Frontends in the maps that no Service
// claims any more are retired.
func (r *Reconciler) withdrawClaims(svc *service) bool {
	if svc.former == nil {
		return true
	}
	done := r.eachItem(svc, len(svc.former.frontends), costClaim, func(i int) {
		key := svc.former.frontends[i].key
		r.claims.Remove(svc.former.claimant, key)
		if to := r.leadsTo(key); to != nil && r.claims.Owner(key) == nil {
			to.port.svc.retire(key)
			r.enqueue(to.port.svc)
		}
	})
	if done {
		svc.former = nil
	}

	return done
}

// publishBackends writes the id of a port that svc owns a frontend of, and its backends. Those that
// cannot be written are left out of the pools.
func (r *Reconciler) publishBackends(svc *service, want *plannedPort) bool {
	if svc.item == 0 && !r.affords(3*costLook) {
		return false
	}
	if want.owned == 0 {
		return true
	}
	if want.have == nil {
		p, err := r.publishName(svc, want.portName)
		if err != nil {
			svc.fail("port "+portText(svc.name, want.portName), err)

			return true
		}
		want.have, p.planned = p, want
	}
	p := want.have
	if svc.item == 0 {
		r.arrange(p)
		p.backends = slices.Grow(p.backends, max(0, len(want.backends)-len(p.backends)))
	}
	done := r.eachItem(svc, len(want.backends), costSlot, func(i int) {
		b := &want.backends[i]
		if !b.pooled {
			return
		}
		if err := r.publishBackend(p, b); err != nil {
			svc.fail("backend "+b.addrPort().String(), err)
		}
	})
	if done {
		r.arrange(p)
	}

	return done
}

// publishRanges writes the source ranges of a port. If one cannot be written, the pools are written
// all the same: they admit too few clients then, but never too many.
func (r *Reconciler) publishRanges(svc *service, want *plannedPort) bool {
	p := want.have
	// Without a frontend the ranges matter to restricted pools that are still in the maps.
	if p == nil || want.owned == 0 && !r.restricted(p) {
		return true
	}

	return r.eachItem(svc, len(want.ranges), costLook, func(i int) {
		prefix := want.ranges[i]
		key := maps.SourceRangeKeyOf(p.id, prefix.Masked())
		if _, there := r.sourceRanges.have[key]; there {
			return
		}
		if err := r.sourceRanges.set(key, 1); err != nil {
			svc.fail("source range "+prefix.String(), err)
		} else {
			p.ranges = append(p.ranges, key)
		}
	})
}

// publishPools writes the pools of a port to which frontends that svc owns will lead.
func (r *Reconciler) publishPools(svc *service, want *plannedPort) bool {
	for ; want.have != nil && svc.item < len(want.pools); svc.item, svc.draft = svc.item+1, nil {
		if !r.affords(costLook) {
			return false
		}
		pool, done := &want.pools[svc.item], false
		var err error
		if svc.draft == nil {
			pool.have = nil
			if pool.owned == 0 {
				continue
			}
			svc.draft, err = r.poolOf(want, pool)
		}
		if err == nil {
			done, err = r.writePool(svc.draft)
		}
		if err != nil {
			svc.fail("pool of "+want.have.String(), err)
			r.takeOut(want)
		} else if !done {
			return false
		} else {
			pool.have = svc.draft
		}
	}

	return true
}

// publishName gives a service port its id.
func (r *Reconciler) publishName(svc *service, name portName) (*port, error) {
	place, err := r.portPlaces.take()
	if err != nil {
		return nil, err
	}
	p := &port{svc: svc, portName: name, id: r.portPlaces.id(place), named: true}
	if err = r.counts.Begin(p.id); err == nil {
		err = r.servicePorts.put(p.id, p.label(), false)
	}
	if err != nil {
		r.portPlaces.untake(place)

		return nil, err
	}

	return p.add(), nil
}

// publishBackend writes a backend, or its flags if it is in the maps.
func (r *Reconciler) publishBackend(p *port, b *plannedBackend) error {
	if b.id != 0 {
		v := r.backends.at(maps.Index(b.id))
		v.Flags = b.flags

		return r.backends.put(maps.Index(b.id), v)
	}
	place, err := r.backendPlaces.take()
	if err != nil {
		return r.backends.note(err)
	}
	id := r.backendPlaces.id(place)
	if err = r.backends.note(r.loads.Begin(place)); err == nil {
		err = r.backends.put(place, maps.BackendOf(id, p.id, b.addrPort(), b.flags))
	}
	if err != nil {
		r.backendPlaces.untake(place)

		return err
	}
	for int(place) >= len(r.poolsPerBackend) {
		r.poolsPerBackend = append(r.poolsPerBackend, 0)
	}
	r.poolsPerBackend[place] = 0
	b.id = id
	p.backends = append(p.backends, id)

	return nil
}

// poolOf returns the pool with the planned settings and backends, as far as these are in the maps.
// One that was about to be retired stays. If there is none, it allocates one, with a draft of what
// to write.
func (r *Reconciler) poolOf(want *plannedPort, planned *plannedPool) (*pool, error) {
	p, s := want.have, planned.settings
	ids := r.scratch[:0]
	for _, member := range planned.members {
		if id := want.backends[member].id; id != 0 {
			ids = append(ids, id)
		}
	}
	complete := len(ids) == len(planned.members)
	slices.Sort(ids)
	r.scratch = ids
	r.spend(len(ids) * costSlot)
	hashed := maps.Hashes(s.algorithm) && len(ids) > 0
	table := func() []uint32 {
		members := planned.table
		if members == nil || !complete {
			members = want.tableOf(slices.DeleteFunc(slices.Clone(planned.members), func(i int32) bool { return want.backends[i].id == 0 }))
		}
		table := make([]uint32, len(members))
		for i, member := range members {
			table[i] = want.backends[member].id
		}

		return table
	}
	for _, have := range p.pools {
		members, v := r.members(have)
		if (settings{v.AffinitySeconds, v.Flags, v.Algorithm}) != s || !slices.Equal(members, ids) || v.TableSize > 0 != hashed {
			continue
		}
		if have.unverified {
			have.unverified = !slices.Equal(r.slots.have[v.TableBase:v.TableBase+v.TableSize], table())
		}
		if !have.unverified {
			have.retired = 0
			r.sweepLater(p) // retires it if no frontend can be written

			return have, nil
		}
	}

	pl, d := &pool{port: p}, &draft{members: len(ids), slots: slices.Clone(ids)}
	if hashed {
		d.slots = append(d.slots, table()...)
	}
	var err error
	if pl.id, err = r.poolPlaces.take(); err != nil {
		return nil, r.pools.note(err)
	}
	if pl.slots, err = r.spans.take(len(ids)); err == nil {
		pl.table, err = r.spans.take(len(d.slots) - len(ids))
	}
	if r.slots.note(err) != nil {
		r.spans.give(pl.slots)
		r.poolPlaces.untake(pl.id)

		return nil, err
	}
	d.value = maps.Pool{
		SlotBase: pl.slots.base, SlotCount: uint32(len(ids)), TableBase: pl.table.base, TableSize: pl.table.count,
		ServicePortId: p.id, AffinitySeconds: s.affinitySeconds, Flags: s.flags, Algorithm: s.algorithm,
	}
	pl.draft = d
	for _, id := range ids {
		r.poolsPerBackend[maps.Index(id)]++
	}
	for int(pl.id) >= len(r.poolsByID) {
		r.poolsByID = append(r.poolsByID, nil)
	}
	r.poolsByID[pl.id] = pl
	p.pools = append(p.pools, pl)
	r.sweepLater(p)

	return pl, nil
}

// writePool writes what a pool has a draft of, from the bottom up: the slots, the table, and the
// pool. It returns false if the budget was spent before that.
func (r *Reconciler) writePool(pl *pool) (bool, error) {
	d := pl.draft
	if d == nil {
		return true, nil
	}
	for ; d.written < len(d.slots); d.written++ {
		if r.spent() {
			return false, nil
		}
		slot := pl.slots.base + uint32(d.written)
		if d.written >= d.members {
			slot = pl.table.base + uint32(d.written-d.members)
		}
		if err := r.slots.put(slot, d.slots[d.written]); err != nil {
			return false, fmt.Errorf("place %d: %w", slot, err)
		}
	}
	if err := r.pools.put(pl.id, d.value); err != nil {
		return false, err
	}
	pl.draft = nil

	return true, nil
}

// publishFrontends makes the frontends that svc owns lead to their pools, catch-alls last.
func (r *Reconciler) publishFrontends(svc *service) bool {
	return r.eachItem(svc, len(svc.plan.frontends), costLook, func(i int) {
		f := &svc.plan.frontends[i]
		want := &svc.plan.ports[f.port]
		pl := want.pools[f.pool].have
		if !f.owned || want.have == nil || pl == nil {
			return
		}
		if err := r.publishFrontend(svc, f, pl); err != nil {
			svc.fail("frontend "+modelKey(f.key).String(), err)
		}
	})
}

// publishFrontend makes a frontend lead to a pool: a new one once its address is marked, one that
// is in the maps with one store.
func (r *Reconciler) publishFrontend(svc *service, f *plannedFrontend, pl *pool) error {
	if _, broken := r.broken[f.key]; broken {
		if err := r.removeBroken(f.key); err != nil {
			return err
		}
	}
	want := maps.Frontend{Key: f.key, PoolId: pl.id, Kind: f.kind}
	id, there := r.frontendIDs.have[f.key]
	have := r.frontends.at(id)
	switch {
	case there && (have == want || r.holder(f.key) != nil):
		return nil
	case !there && isCatchAll(f.key) && len(svc.failures) > 0:
		return nil // a catch-all would refuse the ports that could not be published
	}
	if err := r.addrs.mark(f.key); err != nil {
		return err
	}

	if !there {
		id, err := r.frontendPlaces.take()
		if err != nil {
			return r.frontends.note(err)
		}
		if err := r.frontends.put(id, want); err != nil {
			r.frontendPlaces.untake(id)

			return err
		}
		if err := r.frontendIDs.set(f.key, id); err != nil {
			r.freeFrontend(id, func() {})

			return err
		}
		r.addrs.addFrontend(f.key)
		pl.frontends++

		return nil
	}

	was := r.poolsByID[have.PoolId]
	if err := r.frontends.put(id, want); err != nil || pl == was {
		return err
	}
	pl.frontends++
	r.releasePool(was)
	if was.port != pl.port {
		r.afterGrace(func() error {
			r.frontendGone(f.key, was.port)

			return nil
		})
	}

	return nil
}
