package reconcile

import (
	"errors"
	"slices"

	"github.com/sluice-lb/sluice/maps"
)

// step is how far a Service is published.
type step uint8

const (
	publishPorts step = iota // what frontends lead to
	publishFrontends
	publishDone
)

// publish writes what svc wants and the maps do not have, from the bottom up: for each port
// its name, backends, source ranges and pools, then the frontends that lead to them,
// catch-alls last. What fails is noted, and the rest goes on. It returns false if it was cut
// short, because the operations of this Apply are spent: then it goes on where it stopped.
func (r *Reconciler) publish(svc *service) bool {
	if svc.step == publishPorts {
		for ; svc.at < len(svc.plan.ports); svc.at++ {
			if !r.publishPort(svc, &svc.plan.ports[svc.at]) {
				return false
			}
		}
		svc.step, svc.at = publishFrontends, 0
	}
	for ; svc.at < len(svc.plan.frontends); svc.at++ {
		if r.spent() {
			return false
		}
		f := &svc.plan.frontends[svc.at]
		if err := r.publishFrontend(svc, f); err != nil {
			svc.fail("frontend "+modelKey(f.key).String(), err)
		}
	}
	svc.step = publishDone

	return true
}

// publishPort writes what frontends of a service port lead to. Called again after it was cut
// short, it passes over what it has written. If the Service owns none of the frontends,
// nothing is written, but for the source ranges of those that could not be taken away yet.
func (r *Reconciler) publishPort(svc *service, want *plannedPort) bool {
	if want.owned == 0 {
		return want.have == nil || !r.restricted(want.have) || r.publishRanges(want)
	}
	if want.have == nil {
		p, err := r.publishName(svc, want.portName)
		if err != nil {
			svc.fail("port "+portText(svc.Name, want.portName), err)

			return true
		}
		want.have, p.planned = p, want
	}
	if !r.publishBackends(want) || !r.publishRanges(want) {
		return false
	}
	for i := range want.pools {
		pool := &want.pools[i]
		pool.have = nil
		if pool.owned == 0 {
			continue
		}
		if r.spent() {
			return false
		}
		var err error
		if pool.have, err = r.publishPool(want, pool); err != nil {
			svc.fail("pool of "+want.have.String(), err)
			r.takeOut(want)
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

	return r.addPort(p), nil
}

// publishBackends writes the backends of a port's pools. Those that cannot be written are
// left out of the pools.
func (r *Reconciler) publishBackends(want *plannedPort) bool {
	p := want.have
	known := len(p.backends)
	defer func() {
		if len(p.backends) > known {
			r.sortBackends(p.backends)
		}
	}()
	for i := range want.backends {
		b := &want.backends[i]
		if !b.pooled {
			continue
		}
		if r.spent() {
			return false
		}
		var err error
		if b.id != 0 {
			v := r.backends.at(maps.Index(b.id))
			v.Flags = b.flags
			err = r.backends.put(maps.Index(b.id), v)
		} else if b.id, err = r.publishBackend(p, b); err == nil {
			p.backends = append(p.backends, b.id)
		}
		if err != nil {
			p.svc.fail("backend "+b.addrPort().String(), err)
		}
	}

	return true
}

func (r *Reconciler) publishBackend(p *port, b *plannedBackend) (uint32, error) {
	place, err := r.backendPlaces.take()
	if err != nil {
		return 0, r.backends.note(err)
	}
	id := r.backendPlaces.id(place)
	if err = r.backends.note(r.loads.Reserve(int(place) + 1)); err == nil {
		err = r.backends.put(place, maps.BackendOf(id, p.id, b.addrPort(), b.flags))
	}
	if err != nil {
		r.backendPlaces.untake(place)

		return 0, err
	}
	for int(place) >= len(r.uses) {
		r.uses = append(r.uses, backendUse{})
	}
	r.uses[place] = backendUse{planned: true}

	return id, nil
}

// publishRanges adds to a port's source ranges. When that fails, pools are written
// nevertheless: they are too narrow then, but never open.
func (r *Reconciler) publishRanges(want *plannedPort) bool {
	p := want.have
	for _, prefix := range want.ranges {
		key := maps.SourceRangeKeyOf(p.id, prefix.Masked())
		if _, there := r.sourceRanges.have[key]; there {
			continue
		}
		if r.spent() {
			return false
		}
		if err := r.sourceRanges.set(key, 1); err != nil {
			p.svc.fail("source range "+prefix.String(), err)
		} else {
			p.ranges = append(p.ranges, key)
		}
	}

	return true
}

// publishPool returns the pool with these backends, as far as they are in the maps, and
// these settings, after writing it if there is none. One that was about to be taken out of
// the maps stays.
func (r *Reconciler) publishPool(want *plannedPort, planned *plannedPool) (*pool, error) {
	p := want.have
	ids := r.scratch[:0]
	for _, member := range planned.members {
		if id := want.backends[member].id; id != 0 {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	r.scratch = ids
	hashed := Hashes(planned.algorithm) && len(ids) > 0
	for _, have := range p.pools {
		if r.isPool(have, ids, planned.settings, hashed) {
			have.retired = 0
			r.sweepLater(p) // in case that no frontend can be made to lead to it

			return have, nil
		}
	}
	var table []uint32
	if hashed {
		table = r.tableOf(ids)
	}

	return r.writePool(p, planned.settings, ids, table)
}

// isPool reports whether a pool in the maps has these settings and backends, and the table
// that they need.
func (r *Reconciler) isPool(have *pool, ids []uint32, s settings, hashed bool) bool {
	members, v := r.members(have)
	if (settings{v.AffinitySeconds, v.Flags, v.Algorithm}) != s || !slices.Equal(members, ids) || v.TableSize > 0 != hashed {
		return false
	}
	if have.foreign {
		have.foreign = !slices.Equal(r.slots.have[v.TableBase:v.TableBase+v.TableSize], r.tableOf(ids))
	}

	return !have.foreign
}

// writePool writes a pool, which no frontend leads to yet: its slots and its table, then the
// pool.
func (r *Reconciler) writePool(p *port, s settings, ids, table []uint32) (*pool, error) {
	id, err := r.poolPlaces.take()
	if err != nil {
		return nil, r.pools.note(err)
	}
	pl := &pool{id: id, port: p}
	if pl.slots, err = r.spans.take(len(ids)); err == nil {
		pl.table, err = r.spans.take(len(table))
	}
	if r.slots.note(err) == nil {
		err = errors.Join(putAll(&r.slots, pl.slots.base, ids), putAll(&r.slots, pl.table.base, table))
	}
	if err == nil {
		err = r.pools.put(id, maps.Pool{
			SlotBase: pl.slots.base, SlotCount: uint32(len(ids)), TableBase: pl.table.base, TableSize: uint32(len(table)),
			ServicePortId: p.id, AffinitySeconds: s.affinitySeconds, Flags: s.flags, Algorithm: s.algorithm,
		})
	}
	if err != nil {
		r.spans.give(pl.slots)
		r.spans.give(pl.table)
		r.poolPlaces.untake(id)

		return nil, err
	}
	for _, id := range ids {
		r.uses[maps.Index(id)].pools++
	}
	for int(id) >= len(r.poolsByID) {
		r.poolsByID = append(r.poolsByID, nil)
	}
	r.poolsByID[id] = pl
	p.pools = append(p.pools, pl)
	r.sweepLater(p)

	return pl, nil
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
		return nil // it would refuse the ports that could not be published
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
	r.addrs.lead(f.key)
	pl.frontends++

	return nil
}

// switchFrontend makes a frontend that is in the maps lead to another pool, with one store.
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
	r.unlead(was)
	if was.port != pl.port {
		r.later(func() error {
			r.frontendGone(f.key, was.port)

			return nil
		})
	}

	return nil
}
