package reconcile

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// nameless stands for the Service of everything in the maps whose service port has no name.
// It is never Set, so it goes at the first Prune.
var nameless = lb.ServiceName{}

// service is one Service: what it wants, and what of it is in the maps.
type service struct {
	name    lb.ServiceName
	wanted  bool // it was Set, and not deleted since
	adopted bool // found in the maps, and nothing else is claimed for it yet

	queued bool // in the queue of those that are due

	plan  *plan   // what it has or gets
	ports []*port // in the maps
	*work         // nil: there is none
}

// work is what there is to do for a Service.
type work struct {
	former *plan // what it had before, until its claims are withdrawn
	next   *plan // what it wants as soon as all that plan claims is settled; nil: plan
	progress

	// leaving are frontends in the maps that no Service may claim any more: catch-alls,
	// which go first, and others.
	leaving [2][]maps.FrontendKey
	sweep   []*port // that may have something that nothing needs any more

	dirty    bool // the maps are not known to be as planned
	retry    backoff
	failures []Failure
	fails    int    // how often anything failed; the same again is in failures once
	blocked  bool   // a map was full
	panicked string // of which the stack was told
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

	backends []uint32 // ids
	arranged int      // how many of them are sorted by address; see arrange
	pools    []*pool
	ranges   []maps.SourceRangeKey
}

// pool is a pool in the maps. What it consists of is in the mirrors of pools and slots.
type pool struct {
	id        uint32
	port      *port
	slots     span // may be longer than the pool, if backends were taken out
	table     span
	foreign   bool   // the table is not known to be what this agent would write
	frontends int    // that lead to it
	draft     *draft // nil: it is written
	// retired is which retirement takes the pool out of the maps, after a grace period;
	// zero: none.
	retired uint64
}

// draft is a pool that is being written. Nothing leads to it yet.
type draft struct {
	value   maps.Pool
	slots   []uint32 // the backends, then the table
	members int      // how many of these are the backends
	written int
}

// service returns the Service with this name, after making it if need be.
func (r *Reconciler) service(name lb.ServiceName) *service {
	svc := r.services[name]
	if svc == nil {
		svc = &service{name: name, plan: &plan{claimant: &lb.Claimant{Name: name}}}
		r.services[name] = svc
	}

	return svc
}

// add enters a port among those of its Service.
func (p *port) add() *port {
	p.number = len(p.svc.ports)
	p.svc.ports = append(p.svc.ports, p)

	return p
}

// remove takes a port out of those of its Service.
func (p *port) remove() {
	ports := p.svc.ports
	last := ports[len(ports)-1]
	ports[p.number], last.number = last, p.number
	ports[len(ports)-1] = nil
	p.svc.ports = ports[:len(ports)-1]
}

// awake makes work possible for svc.
func (svc *service) awake() {
	if svc.work == nil {
		svc.work = &work{progress: progress{step: published}}
	}
}

// idle reports whether there is nothing to do for svc, which is awake.
func (svc *service) idle() bool {
	return !svc.dirty && len(svc.leaving[0])+len(svc.leaving[1])+len(svc.sweep) == 0
}

// rests reports whether only the frontends of what svc wants are kept.
func (svc *service) rests() bool { return svc.plan.ports == nil && len(svc.plan.frontends) > 0 }

// rest ends the work for a Service that has none. If nothing of it is on its way out of the
// maps, its plan is forgotten, too, but for the frontends.
func (svc *service) rest() {
	svc.work = nil
	if svc.plan.rows() >= largePlan {
		return
	}
	for _, p := range svc.ports {
		for _, pl := range p.pools {
			if pl.frontends == 0 || pl.retired > 0 {
				return
			}
		}
	}
	svc.plan.ports = nil
	for _, p := range svc.ports {
		p.planned = nil
	}
}

// leave has a frontend in the maps leave them.
func (svc *service) leave(key maps.FrontendKey) {
	svc.awake()
	when := 1
	if isCatchAll(key) {
		when = 0
	}
	svc.leaving[when] = append(svc.leaving[when], key)
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
	if to := r.leadsTo(key); to != nil && to.port.svc.adopted && to.port.svc.name != nameless {
		return to.port.svc
	}

	return nil
}

func (r *Reconciler) endpoint(id uint32) endpoint {
	b := r.backends.at(maps.Index(id))

	return endpoint{b.Addr, maps.Port(b.Port)}
}

// arrange sorts the backends of p by address: those that were added since the last time, and
// them among the others.
func (r *Reconciler) arrange(p *port) {
	if p.arranged == len(p.backends) {
		return
	}
	compare := func(a, b uint32) int {
		return cmp.Or(compareEndpoints(r.endpoint(a), r.endpoint(b)), cmp.Compare(a, b))
	}
	added := p.backends[p.arranged:]
	slices.SortFunc(added, compare)
	r.spend(len(p.backends) * costSlot)
	added = slices.Clone(added)
	for to, old := len(p.backends)-1, p.arranged; len(added) > 0; to-- {
		if last := len(added) - 1; old > 0 && compare(p.backends[old-1], added[last]) > 0 {
			old--
			p.backends[to] = p.backends[old]
		} else {
			p.backends[to], added = added[last], added[:last]
		}
	}
	p.arranged = len(p.backends)
}

// members returns the backends in the slots of a pool, ascending by id, and value what the
// array of pools has of it, or will have.
func (r *Reconciler) members(pl *pool) (ids []uint32, value maps.Pool) {
	if d := pl.draft; d != nil {
		return d.slots[:d.members], d.value
	}
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
func (p *port) mayBeUDP() bool { return p.protocol == lb.UDP || p.svc.name == nameless }

// label is what service_ports has at p's id.
func (p *port) label() maps.ServicePort {
	return maps.ServicePortOf(p.svc.name.Namespace, p.svc.name.Name, p.name, uint8(p.protocol), uint8(p.family))
}

func compareNames(a, b lb.ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareServices(a, b *service) int { return compareNames(a.name, b.name) }
