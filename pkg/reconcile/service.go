package reconcile

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// nameless stands for the Service of everything in the maps whose service port has no name.
// It is never Set, so it goes at the first Prune.
var nameless = lb.ServiceName{}

// service is one Service: what it wants, and what of it is in the maps.
type service struct {
	lb.Claimant
	wanted  bool // it was Set, and not deleted since
	adopted bool // found in the maps, and neither Set nor deleted yet

	plan  plan
	ports []*port // in the maps
	// leaving are frontends in the maps that no Service may claim any more: catch-alls,
	// which go first, and others.
	leaving [2][]maps.FrontendKey
	sweep   []*port // that may have something that nothing needs any more

	dirty     bool // the maps are not as planned
	step      step // where publishing goes on
	at        int  // in that step
	queued    bool // in the queue of those that are due
	retry     backoff
	failures  []Failure
	fails     int    // how often anything failed; the same again is in failures once
	blocked   bool   // a map was full
	unplanned error  // why the last resolution could not be planned
	panicked  string // of which the stack was told
}

// port is one service port in one family, in the maps.
type port struct {
	svc *service
	portName
	id      uint32
	number  int  // in svc.ports
	named   bool // in service_ports
	sweeps  bool // in svc.sweep
	planned *plannedPort

	backends []uint32 // ids, sorted by address
	pools    []*pool
	ranges   []maps.SourceRangeKey
}

// pool is a pool in the maps. What it consists of is in the mirrors of pools and slots.
type pool struct {
	id        uint32
	port      *port
	slots     span // may be longer than the pool, if backends were taken out
	table     span
	foreign   bool // the table is not known to be what this agent would write
	frontends int  // that lead to it
	// retired is which retirement takes the pool out of the maps, after a grace period;
	// zero: none.
	retired uint64
}

// backendUse is what a backend in the maps is needed for.
type backendUse struct {
	pools   int32 // slots of pools that lead to it, or did and are in their grace period
	planned bool
}

// service returns the Service with this name, after making it if need be.
func (r *Reconciler) service(name lb.ServiceName) *service {
	svc := r.services[name]
	if svc == nil {
		svc = &service{Claimant: lb.Claimant{Name: name}}
		r.services[name] = svc
	}

	return svc
}

func (r *Reconciler) addPort(p *port) *port {
	p.number = len(p.svc.ports)
	p.svc.ports = append(p.svc.ports, p)
	r.ports[p.id] = p

	return p
}

func (r *Reconciler) removePort(p *port) {
	delete(r.ports, p.id)
	ports := p.svc.ports
	last := ports[len(ports)-1]
	ports[p.number], last.number = last, p.number
	ports[len(ports)-1] = nil
	p.svc.ports = ports[:len(ports)-1]
}

// carryOut makes svc want what is planned. Nothing is written.
func (r *Reconciler) carryOut(svc *service, created time.Time, want plan) {
	r.release(svc)
	before := svc.plan
	changed := r.claim(svc, created, want)
	ports := make(map[portName]*port, len(svc.ports))
	for _, p := range svc.ports {
		if ports[p.portName] == nil { // the first, if the maps had two
			ports[p.portName] = p
		}
		p.planned = nil
		for _, id := range p.backends {
			r.uses[maps.Index(id)].planned = false
		}
		r.sweepLater(p)
	}
	for i := range svc.plan.ports {
		planned := &svc.plan.ports[i]
		if planned.have = ports[planned.portName]; planned.have == nil {
			continue
		}
		planned.have.planned = planned
		for j := range planned.backends {
			b := &planned.backends[j]
			if at, ok := r.search(planned.have.backends, b.endpoint); ok {
				b.id = planned.have.backends[at]
				r.uses[maps.Index(b.id)].planned = true
			}
		}
	}
	if changed {
		for i := range before.frontends {
			r.leaveIfUnclaimed(before.frontends[i].key)
		}
	}
	r.touch(svc)
}

// claim has svc claim the frontends of its new plan. Services that gain or lose by that are
// due. It reports whether svc may not claim all any more that it did before.
func (r *Reconciler) claim(svc *service, created time.Time, want plan) bool {
	before := svc.plan
	if created.Equal(svc.Created) && before.claimsAs(&want) {
		svc.plan = want
		for i := range before.frontends {
			if before.frontends[i].owned {
				r.own(svc, i, true)
			}
		}

		return false
	}
	for i := range before.frontends {
		r.claims.Remove(&svc.Claimant, modelKey(before.frontends[i].key))
	}
	svc.plan, svc.Created = want, created
	for i := range want.frontends {
		r.claims.Add(&svc.Claimant, i, modelKey(want.frontends[i].key), lb.Kind(want.frontends[i].kind))
	}

	return true
}

// own notes that svc owns a frontend that it claims, or does not any more.
func (r *Reconciler) own(svc *service, number int, owns bool) {
	f := &svc.plan.frontends[number]
	if f.owned == owns {
		return
	}
	f.owned = owns
	more := 1
	if !owns {
		more = -1
	}
	p := &svc.plan.ports[f.port]
	p.owned += more
	p.pools[f.pool].owned += more
	if p.owned == 0 && p.have != nil {
		r.sweepLater(p.have)
	}
}

// leaveIfUnclaimed has a frontend in the maps that no Service claims leave them.
func (r *Reconciler) leaveIfUnclaimed(key maps.FrontendKey) {
	if owner := r.leadsTo(key); owner != nil && r.claims.Owner(modelKey(key)) == nil {
		r.leave(owner.port.svc, key)
		r.wake(owner.port.svc)
	}
}

func (r *Reconciler) leave(svc *service, key maps.FrontendKey) {
	when := 1
	if isCatchAll(key) {
		when = 0
	}
	svc.leaving[when] = append(svc.leaving[when], key)
}

// release ends the time in which svc keeps what an earlier agent gave it. Services that
// waited for a frontend of it are due.
func (r *Reconciler) release(svc *service) {
	if !svc.adopted {
		return
	}
	svc.adopted = false
	for _, keys := range svc.leaving {
		for _, key := range keys {
			if owner := r.claims.Owner(modelKey(key)); owner != nil && owner != &svc.Claimant {
				r.touch(r.services[owner.Name])
			}
		}
	}
}

// leadsTo returns the pool that a frontend in the maps leads to, or nil.
func (r *Reconciler) leadsTo(key maps.FrontendKey) *pool {
	id, there := r.frontendIDs.have[key]
	if _, broken := r.broken[key]; !there || broken {
		return nil
	}

	return r.poolsByID[r.frontends.at(id).PoolId]
}

// holder returns the adopted Service that keeps a frontend until it is Set or pruned, or nil.
func (r *Reconciler) holder(key maps.FrontendKey) *service {
	if to := r.leadsTo(key); to != nil && to.port.svc.adopted && to.port.svc.Name != nameless {
		return to.port.svc
	}

	return nil
}

// search returns where among backends, which are sorted by address, the one that answers
// there is, or belongs.
func (r *Reconciler) search(backends []uint32, at endpoint) (int, bool) {
	return slices.BinarySearchFunc(backends, at, func(id uint32, at endpoint) int {
		return compareEndpoints(r.endpoint(id), at)
	})
}

func (r *Reconciler) endpoint(id uint32) endpoint {
	b := r.backends.at(maps.Index(id))

	return endpoint{b.Addr, maps.Port(b.Port)}
}

func compareEndpoints(a, b endpoint) int {
	return cmp.Or(bytes.Compare(a.addr.Bytes[:], b.addr.Bytes[:]), cmp.Compare(a.port, b.port))
}

func (r *Reconciler) sortBackends(ids []uint32) {
	slices.SortFunc(ids, func(a, b uint32) int {
		return cmp.Or(compareEndpoints(r.endpoint(a), r.endpoint(b)), cmp.Compare(a, b))
	})
}

// members returns the backends in the slots of a pool, ascending by id, and value what the
// array of pools has of it.
func (r *Reconciler) members(pl *pool) (ids []uint32, value maps.Pool) {
	value = r.pools.at(pl.id)
	if value.SlotCount == 0 {
		return nil, value
	}

	return r.slots.have[value.SlotBase : value.SlotBase+value.SlotCount], value
}

// tableOf returns the table of backends, by which algorithms that hash choose. It depends on
// their addresses alone.
func (r *Reconciler) tableOf(ids []uint32) []uint32 {
	addrs := make([]netip.AddrPort, len(ids))
	for i, id := range ids {
		addrs[i] = r.backends.at(maps.Index(id)).AddrPort()
	}
	table := maglev.Table(addrs)
	of := make([]uint32, len(table))
	for i, member := range table {
		of[i] = ids[member]
	}

	return of
}

// owned reports whether the Service owns a frontend of p.
func (p *port) owned() bool { return p.planned != nil && p.planned.owned > 0 }

// restricted reports whether a pool of p lets in only source ranges, or did until the
// grace period that runs.
func (r *Reconciler) restricted(p *port) bool {
	return slices.ContainsFunc(p.pools, func(pl *pool) bool {
		return r.pools.at(pl.id).Flags&maps.PoolSourceRanges != 0
	})
}

// mayBeUDP reports whether connected UDP sockets may have dialled p. Of a port without a
// name, nothing is known.
func (p *port) mayBeUDP() bool { return p.protocol == lb.UDP || p.svc.Name == nameless }

// label is what service_ports has at p's id.
func (p *port) label() maps.ServicePort {
	return maps.ServicePortOf(p.svc.Name.Namespace, p.svc.Name.Name, p.name, uint8(p.protocol), uint8(p.family))
}

func compareNames(a, b lb.ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareServices(a, b *service) int { return compareNames(a.Name, b.Name) }
