package reconcile

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// carryOut is the work for a Service: it replaces its plan if there is a new one, publishes it, and
// retires what the plan does not need any more.
func (r *Reconciler) carryOut(svc *service) {
	if svc.publishing {
		r.replacePlan(svc)
		r.publish(svc)
	}
	r.retireFrontends(svc)
	svc.again = false
	r.sweepPorts(svc)
}

// setPlan makes next the plan of svc. It enters as many claims as the slice allows that all calls of
// Set between two Applies share, so that the frontends of Services that are Set together have their
// owners before any of them is written. While svc is worked on, next has to wait.
func (r *Reconciler) setPlan(svc *service, next *plan) {
	svc.ensureWork()
	svc.next = next
	r.markDirty(svc)
	if svc.worker == nil && !r.spent() && !svc.plan.sameClaims(next) {
		r.run(svc, (*Reconciler).replacePlan) // after a panic Apply tries it again, and reports it
	}
}

// replacePlan replaces the plan of svc. The claims of the new plan are entered before those of the
// former are withdrawn, so that no other Service owns a frontend in between. Frontends in the maps
// that no Service claims any more are retired.
func (r *Reconciler) replacePlan(svc *service) {
	if svc.entering == nil {
		svc.entering, svc.entered, svc.next = svc.next, 0, nil
	}
	former, next := svc.plan, svc.entering
	switch {
	case next == nil:
		return
	case svc.entered == 0 && former.sameClaims(next):
		next.claimant = former.claimant
		for i := range former.frontends {
			next.frontends[i].owned = former.frontends[i].owned
		}
		r.spend(len(former.frontends) * costSlot)
	default:
		for ; svc.entered < len(next.frontends); svc.entered++ {
			r.pay(costClaim)
			f := &next.frontends[svc.entered]
			r.claims.Add(next.claimant, svc.entered, f.key, lb.Kind(f.kind), r.isAdoptedBy(svc, f.key))
		}
		for i := range former.frontends {
			r.pay(costClaim)
			key := former.frontends[i].key
			r.claims.Remove(former.claimant, key)
			if to := r.leadsTo(key); to != nil && r.claims.Owner(key) == nil {
				to.port.svc.retire(key)
				r.retireLater(to.port.svc)
			}
		}
	}
	svc.plan, svc.entering, svc.adopted = next, nil, false
}

// moved records that a Service owns a frontend that it claims, or has lost it to another one. The
// Service is due, unless it is about to publish the plan anyway.
func (r *Reconciler) moved(s *lb.Claimant, number int, owns bool) {
	svc := r.services[s.Name]
	entering := svc.work != nil && svc.entering != nil
	if entering && svc.entering.claimant == s {
		svc.entering.frontends[number].owned = owns
	} else {
		svc.plan.frontends[number].owned = owns
	}
	if !entering {
		r.markDirty(svc)
	}
}

// publish carries out the plan of svc. Writes go from the bottom up, so that at any moment every
// frontend leads to backends that exist. Failures are recorded, and publishing continues with the
// rest.
func (r *Reconciler) publish(svc *service) {
	svc.dirty = svc.next != nil
	plan := svc.plan
	if plan.isCompact() {
		plan.rebuild()
		r.spend(plan.rows() * costClaim)
	}
	r.matchPorts(svc)
	for i := range plan.ports {
		r.publishPort(svc, &plan.ports[i])
	}
	for i := range plan.frontends { // catch-alls last
		r.pay(costLook)
		f := &plan.frontends[i]
		if pl := plan.ports[f.port].pools[f.pool].have; pl != nil && f.owned {
			if err := r.publishFrontend(svc, f, pl); err != nil {
				svc.failFrontend(f.key, err)
			}
		}
	}
}

// matchPorts finds the ports of the plan in the maps, and which of them are needed. Of two ports with
// the same name the first counts. What the plan does not have is retired later.
func (r *Reconciler) matchPorts(svc *service) {
	byName := make(map[portName]*port, len(svc.ports))
	for _, p := range slices.Backward(svc.ports) {
		byName[p.portName], p.planned = p, false
	}
	for i := range svc.plan.ports {
		want := &svc.plan.ports[i]
		want.have, want.owned = byName[want.portName], false
		if want.have != nil {
			want.have.planned = true
		}
		for j := range want.pools {
			want.pools[j].have, want.pools[j].owned = nil, false
		}
	}
	for i := range svc.plan.frontends {
		if f := &svc.plan.frontends[i]; f.owned {
			svc.plan.ports[f.port].owned, svc.plan.ports[f.port].pools[f.pool].owned = true, true
		}
	}
	r.spend(len(svc.ports)*costLook + svc.plan.rows()*costSlot)
	for _, p := range svc.ports {
		if p.planned {
			continue
		}
		p.backends = r.backendsByAddress(p)
		p.owned, p.plannedBackends, p.plannedRanges = false, 0, 0
	}
}

// publishPort writes a port from the bottom up: its name, its backends, its source ranges, and the
// pools to which frontends that the Service owns will lead.
func (r *Reconciler) publishPort(svc *service, want *plannedPort) {
	r.pay(3 * costLook)
	p := want.have
	if p == nil {
		if !want.owned {
			return
		}
		var err error
		if p, err = r.newPort(svc, want.portName); err != nil {
			svc.fail("port "+portText(svc.name, want.portName), err)

			return
		}
		want.have = p
	}
	p.owned = want.owned
	r.publishBackends(p, want)
	r.publishRanges(p, want)
	for i := range want.pools {
		r.pay(costLook)
		pl := &want.pools[i]
		if !pl.owned {
			continue
		}
		var err error
		if pl.have, err = r.publishPool(want, pl); err != nil {
			svc.fail("pool of "+p.String(), err)
			r.takeOut(want)
		}
	}
}

// newPort gives a service port its id.
func (r *Reconciler) newPort(svc *service, name portName) (*port, error) {
	place, err := r.portPlaces.take()
	if err != nil {
		return nil, err
	}
	p := &port{svc: svc, portName: name, id: r.portPlaces.id(place), planned: true, named: true}
	if err = r.counts.Begin(p.id); err == nil {
		err = r.servicePorts.put(p.id, p.label(), false)
	}
	if err != nil {
		r.portPlaces.untake(place)

		return nil, err
	}

	svc.ports = append(svc.ports, p)

	return p, nil
}

// publishBackends writes the backends of a port that the Service owns a frontend of. Those that
// cannot be written are left out of the pools. Both lists are in the order of addresses: one pass
// finds the planned backends among those in the maps.
func (r *Reconciler) publishBackends(p *port, want *plannedPort) {
	have := r.backendsByAddress(p)
	planned := make([]uint32, 0, len(want.backends))
	var others []uint32
	defer func() {
		p.backends, p.plannedBackends = append(append(planned, others...), have...), int32(len(planned))
	}()
	for i := range want.backends {
		r.pay(costSlot)
		b := &want.backends[i]
		for ; len(have) > 0 && compareEndpoints(r.endpoint(have[0]), b.endpoint) < 0; have = have[1:] {
			r.spend(costSlot)
			others = append(others, have[0])
		}
		b.id = 0
		if len(have) > 0 && r.endpoint(have[0]) == b.endpoint {
			b.id, have = have[0], have[1:]
		}
		if b.pooled && want.owned {
			if err := r.publishBackend(p, b); err != nil {
				p.svc.fail("backend "+b.addrPort().String(), err)
			}
		}
		if b.id != 0 {
			planned = append(planned, b.id)
		}
	}
}

// publishBackend writes a backend, or its flags if it is in the maps.
func (r *Reconciler) publishBackend(p *port, b *plannedBackend) error {
	if b.id != 0 {
		v := r.backends.at(maps.Index(b.id))
		v.Flags = b.flags

		return r.backends.put(maps.Index(b.id), v)
	}
	key := backendKey{p.id, b.endpoint}
	id, err := r.takeBackend(key)
	if err != nil {
		return err
	}
	if err := r.backends.put(maps.Index(id), maps.BackendOf(id, p.id, b.addrPort(), b.flags)); err != nil {
		r.freeBackend(key, id)

		return err
	}
	b.id = id

	return nil
}

// fewRanges is up to how many source ranges, of all ports, a Service may use the last part of the map.
const fewRanges = 256

// publishRanges writes the source ranges of a port. If one cannot be written, the pools are written
// all the same: they admit too few clients then, but never too many. A Service with many leaves the last part of the map to
// those with few.
func (r *Reconciler) publishRanges(p *port, want *plannedPort) {
	// Without a frontend the ranges matter to restricted pools that are still in the maps.
	if !want.owned && !r.restricted(p) {
		return
	}
	r.spend(len(want.ranges) * costSlot)
	if slices.EqualFunc(want.ranges, p.ranges, func(prefix netip.Prefix, key maps.SourceRangeKey) bool { return p.rangeKey(prefix) == key }) {
		p.plannedRanges = int32(len(p.ranges))

		return
	}
	planned := make(map[maps.SourceRangeKey]struct{}, len(want.ranges))
	var written []maps.SourceRangeKey
	defer func() {
		p.plannedRanges = int32(len(written))
		for _, key := range p.ranges {
			if _, again := planned[key]; !again {
				written = append(written, key)
			}
		}
		p.ranges = written
	}()
	for _, prefix := range want.ranges {
		r.pay(costLook)
		key := p.rangeKey(prefix)
		var err error
		if _, there := r.sourceRanges.have[key]; !there && p.svc.plan.ranges > fewRanges {
			err = r.sourceRanges.admit(ofFewRanges)
		}
		if err == nil {
			err = r.sourceRanges.set(key, 1)
		}
		if err != nil {
			p.svc.fail("source range "+prefix.String(), err)
			p.svc.lacksRanges = p.svc.lacksRanges || errors.Is(err, maps.ErrFull)
		} else if _, twice := planned[key]; !twice {
			planned[key] = struct{}{}
			written = append(written, key)
		}
	}
}

// publishPool returns the pool with the planned settings and backends, as far as these are in the
// maps. One that was about to be retired stays. If there is none, it writes one.
func (r *Reconciler) publishPool(want *plannedPort, planned *plannedPool) (*pool, error) {
	ids := make([]uint32, 0, len(planned.members))
	for _, member := range planned.members {
		if id := want.backends[member].id; id != 0 {
			ids = append(ids, id)
		}
	}
	complete := len(ids) == len(planned.members)
	slices.Sort(ids)
	r.spend(len(ids) * costSlot)
	hashed := maps.Hashes(planned.algorithm) && len(ids) > 0
	table := func() []uint32 {
		members := planned.table
		if members == nil || !complete {
			members = want.tableOf(slices.DeleteFunc(slices.Clone(planned.members), func(i int32) bool { return want.backends[i].id == 0 }), r.tableSize)
		}
		r.spend(len(members) * costSlot)
		table := make([]uint32, len(members))
		for i, member := range members {
			table[i] = want.backends[member].id
		}

		return table
	}
	for _, have := range want.have.pools {
		members, v := r.members(have)
		if (settings{v.AffinitySeconds, v.Flags, v.Algorithm}) != planned.settings || !slices.Equal(members, ids) || v.TableSize > 0 != hashed {
			continue
		}
		if have.unverified {
			have.unverified = !slices.Equal(r.slots.have[v.TableBase:v.TableBase+v.TableSize], table())
		}
		if !have.unverified {
			have.retired = 0

			return have, nil
		}
	}
	if hashed {
		return r.newPool(want.have, planned.settings, ids, table())
	}

	return r.newPool(want.have, planned.settings, ids, nil)
}

// newPool writes a pool, to which no frontend leads yet, from the bottom up: the slots, the table,
// and the pool.
func (r *Reconciler) newPool(p *port, s settings, members, table []uint32) (*pool, error) {
	id, err := r.poolPlaces.take()
	if err != nil {
		return nil, err
	}
	for int(id) >= len(r.poolsByID) {
		r.poolsByID = append(r.poolsByID, nil)
	}
	pl := &pool{port: p, id: id}
	defer func() {
		if r.poolsByID[id] != pl { // it was not written
			r.spans.give(pl.slots)
			r.spans.give(pl.table)
			r.poolPlaces.untake(id)
		}
	}()
	write := func(to *span, ids []uint32) (err error) {
		if *to, err = r.spans.take(len(ids)); err != nil {
			return err
		}
		for i, id := range ids {
			r.pay(0)
			if err := r.slots.put(to.base+uint32(i), id); err != nil {
				return fmt.Errorf("place %d: %w", to.base+uint32(i), err)
			}
		}

		return nil
	}
	if err := write(&pl.slots, members); err != nil {
		return nil, err
	}
	if err := write(&pl.table, table); err != nil {
		return nil, err
	}
	if err := r.pools.put(id, maps.Pool{
		SlotBase: pl.slots.base, SlotCount: pl.slots.count, TableBase: pl.table.base, TableSize: pl.table.count,
		ServicePortId: p.id, AffinitySeconds: s.affinitySeconds, Flags: s.flags, Algorithm: s.algorithm,
	}); err != nil {
		return nil, err
	}
	r.poolsByID[id] = pl
	p.pools = append(p.pools, pl)

	return pl, nil
}

// newFrontend writes a frontend that is not in the maps, at an address that is marked.
func (r *Reconciler) newFrontend(svc *service, want maps.Frontend) error {
	written := false
	defer func() {
		if written {
			r.addrs.addFrontend(want.Key)
		} else {
			r.addrs.keep(want.Key, svc.name)
		}
	}()
	id, err := r.frontendPlaces.take()
	if err != nil {
		return err
	}
	if err := r.frontends.put(id, want); err != nil {
		r.frontendPlaces.untake(id)

		return err
	}
	if err := r.frontendIDs.set(want.Key, id); err != nil {
		r.freeFrontend(id, func() {})

		return err
	}
	written = true

	return nil
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
	case there && (have == want || r.adopter(f.key) != nil):
		return nil
	case !there && isCatchAll(f.key) && len(svc.failures) > 0:
		return nil // a catch-all would refuse the ports that could not be published
	}
	if kind := lb.Kind(f.kind); !there && (kind == lb.KindLoadBalancer || kind == lb.KindExternalIP) {
		if err := r.addrs.admitExternal(f.key.Addr, svc.name); err != nil {
			return err
		}
		if err := r.frontendIDs.admit(ofClusterIPs); err != nil {
			return err
		}
	}
	if err := r.addrs.mark(f.key); err != nil {
		return err
	}

	if !there {
		if err := r.newFrontend(svc, want); err != nil {
			return err
		}
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
