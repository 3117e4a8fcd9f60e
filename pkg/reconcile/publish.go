package reconcile

import (
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
	publishingBackends              // ports get their ids and backends
	publishingRanges                // source ranges
	publishingPools                 // pools, to which no frontend leads yet
	publishingFrontends             // frontends, which lead to the pools
	published
)

// progress is where publishing continues after a slice ended.
type progress struct {
	step  step
	port  int // index, in steps that go through ports
	item  int // index in the port, or in the step
	draft *pool
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
			done = r.publishBackends(svc)
		case publishingRanges:
			done = r.publishRanges(svc)
		case publishingPools:
			done = r.publishPools(svc)
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

// each calls do for n items, starting at svc.item. It returns false if the budget was spent
// before the last one.
func (r *Reconciler) each(svc *service, n, cost int, do func(i int)) bool {
	for ; svc.item < n; svc.item++ {
		if r.spent() {
			return false
		}
		r.spend(cost)
		do(svc.item)
	}

	return true
}

// eachPort calls do for every planned port, starting at svc.port. It returns false if the budget
// was spent before the last one, or do returned false.
func (r *Reconciler) eachPort(svc *service, do func(want *plannedPort) bool) bool {
	for ; svc.port < len(svc.plan.ports); svc.port, svc.item = svc.port+1, 0 {
		if r.spent() {
			return false
		}
		r.spend(costLook)
		if !do(&svc.plan.ports[svc.port]) {
			return false
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

	return r.each(svc, len(svc.plan.frontends), costClaim, func(i int) {
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

	return r.each(svc, len(svc.ports), costLook, func(i int) {
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

	return r.eachPort(svc, func(want *plannedPort) bool {
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
	done := r.each(svc, len(svc.former.frontends), costClaim, func(i int) {
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

// publishBackends gives an id to each port of which svc owns a frontend, and writes the backends
// of its pools. Backends that cannot be written are left out of the pools.
func (r *Reconciler) publishBackends(svc *service) bool {
	return r.eachPort(svc, func(want *plannedPort) bool {
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
		if svc.item == 0 {
			r.arrange(want.have)
			want.have.backends = slices.Grow(want.have.backends, max(0, len(want.backends)-len(want.have.backends)))
		}
		done := r.each(svc, len(want.backends), costSlot, func(i int) {
			if b := &want.backends[i]; b.pooled {
				if err := r.publishBackend(want.have, b); err != nil {
					svc.fail("backend "+b.addrPort().String(), err)
				}
			}
		})
		if done {
			r.arrange(want.have)
		}

		return done
	})
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
	if err = r.backends.note(r.loads.Reserve(int(place) + 1)); err == nil {
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

// publishRanges adds source ranges to those of the ports. If that fails, pools are written
// all the same: they admit too few clients then, but never too many. Ports of which svc owns no
// frontend get only the ranges of restricted pools that are still in the maps.
func (r *Reconciler) publishRanges(svc *service) bool {
	return r.eachPort(svc, func(want *plannedPort) bool {
		p := want.have
		if p == nil || want.owned == 0 && !r.restricted(p) {
			return true
		}

		return r.each(svc, len(want.ranges), costLook, func(i int) {
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
	})
}

// publishPools writes the pools that frontends of svc need, unless there are equal ones.
func (r *Reconciler) publishPools(svc *service) bool {
	return r.eachPort(svc, func(want *plannedPort) bool {
		for ; svc.item < len(want.pools); svc.item, svc.draft = svc.item+1, nil {
			if r.spent() {
				return false
			}
			r.spend(costLook)
			pool := &want.pools[svc.item]
			if svc.draft == nil {
				pool.have = nil
				if want.have == nil || pool.owned == 0 {
					continue
				}
			}
			done, err := r.publishPool(svc, want, pool)
			if err != nil {
				pool.have = nil
				svc.fail("pool of "+want.have.String(), err)
				r.takeOut(want)
			} else if !done {
				return false
			}
		}

		return true
	})
}

// publishPool sets planned.have to a pool with the planned settings and backends, as far as these
// are in the maps. If there is none, it writes one, to which no frontend leads yet: the slots, the
// table, and the pool. A pool that was about to be retired stays.
func (r *Reconciler) publishPool(svc *service, want *plannedPort, planned *plannedPool) (bool, error) {
	if svc.draft == nil {
		pl, err := r.poolOf(want, planned)
		if err != nil {
			return false, err
		}
		pl.retired = 0
		r.sweepLater(pl.port) // retires it if no frontend can be written
		planned.have, svc.draft = pl, pl
	}
	pl := svc.draft
	d := pl.draft
	if d == nil {
		return true, nil
	}
	for d.written < len(d.slots) {
		if r.spent() {
			return false, nil
		}
		base, end := pl.slots.base, d.members
		if d.written >= d.members {
			base, end = pl.table.base-uint32(d.members), len(d.slots)
		}
		end = min(end, d.written+costOperation)
		if err := putAll(&r.slots, base+uint32(d.written), d.slots[d.written:end]); err != nil {
			return false, err
		}
		d.written = end
	}
	if err := r.pools.put(pl.id, d.value); err != nil {
		return false, err
	}
	pl.draft = nil

	return true, nil
}

// poolOf returns a pool as planned, or reserves a place and slots for a new one.
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
	hashed := Hashes(s.algorithm) && len(ids) > 0
	table := func() []uint32 {
		if planned.table == nil || !complete {
			return r.tableOf(ids)
		}
		table := make([]uint32, len(planned.table))
		for i, member := range planned.table {
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
	for _, id := range slices.Compact(ids) {
		r.poolsPerBackend[maps.Index(id)]++
	}
	for int(pl.id) >= len(r.poolsByID) {
		r.poolsByID = append(r.poolsByID, nil)
	}
	r.poolsByID[pl.id] = pl
	p.pools = append(p.pools, pl)

	return pl, nil
}

// publishFrontends makes the frontends that svc owns lead to their pools, catch-alls last.
func (r *Reconciler) publishFrontends(svc *service) bool {
	return r.each(svc, len(svc.plan.frontends), costLook, func(i int) {
		f := &svc.plan.frontends[i]
		if err := r.publishFrontend(svc, f); err != nil {
			svc.fail("frontend "+modelKey(f.key).String(), err)
		}
	})
}

// publishFrontend makes a frontend that svc claims lead to its pool, if svc owns it.
func (r *Reconciler) publishFrontend(svc *service, f *plannedFrontend) error {
	want := &svc.plan.ports[f.port]
	pl := want.pools[f.pool].have
	if !f.owned || want.have == nil || pl == nil {
		return nil
	}
	if _, broken := r.broken[f.key]; broken {
		if err := r.removeBroken(f.key); err != nil {
			return err
		}
	}
	id, there := r.frontendIDs.have[f.key]
	if there {
		return r.switchFrontend(id, f, pl)
	}
	if isCatchAll(f.key) && len(svc.failures) > 0 {
		return nil // a catch-all would refuse the ports that could not be published
	}
	if err := r.addrs.mark(f.key); err != nil {
		return err
	}
	id, err := r.frontendPlaces.take()
	if err != nil {
		return r.frontends.note(err)
	}
	if err := r.frontends.put(id, maps.Frontend{Key: f.key, PoolId: pl.id, Kind: f.kind}); err != nil {
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

// switchFrontend makes a frontend in the maps lead to another pool, with one store.
func (r *Reconciler) switchFrontend(id uint32, f *plannedFrontend, pl *pool) error {
	have := r.frontends.at(id)
	want := maps.Frontend{Key: f.key, PoolId: pl.id, Kind: f.kind}
	if have == want || r.holder(f.key) != nil {
		return nil
	}
	if err := r.addrs.mark(f.key); err != nil {
		return err
	}
	was := r.poolsByID[have.PoolId]
	if err := r.frontends.put(id, want); err != nil {
		return err
	}
	if pl == was {
		return nil
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
