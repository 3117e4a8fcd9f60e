package reconcile

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// nameless is the Service of everything in the maps whose service port has no name. It is never
// Set, so the first Prune deletes it.
var nameless = lb.ServiceName{}

// service is one Service: its plan, and its ports in the maps.
type service struct {
	name    lb.ServiceName
	wanted  bool // it was Set, and has not been deleted
	adopted bool // found in the maps, and no plan has replaced that yet

	queued bool // in Reconciler.due

	plan  *plan   // carried out, or being carried out
	ports []*port // in the maps
	*work         // nil: the maps are as planned
}

// work is the state of a Service while the maps are not as planned.
type work struct {
	former *plan // the plan before, until its claims are withdrawn
	next   *plan // replaces plan once the claims of plan are entered; may be nil
	progress

	// retiring are frontends in the maps that no Service claims any more: catch-alls, which are
	// deleted first, and others.
	retiring [2][]maps.FrontendKey
	sweep    []*port // ports to check for what they do not need any more

	dirty    bool // publishing has not gone through the whole plan without a failure
	retry    backoff
	failures []Failure
	fails    int    // number of failed writes; failures has each only once
	blocked  bool   // a map was full
	panicked string // the last panic, of which the stack was reported
}

// port is one service port in one family, in the maps. There are many, so it is small.
type port struct {
	svc *service
	portName
	planned  *plannedPort
	backends []uint32 // ids
	pools    []*pool
	ranges   []maps.SourceRangeKey

	id       uint32
	arranged int32 // how many of backends are sorted by address; see arrange
	number   int32 // in svc.ports
	named    bool  // in service_ports
	sweeps   bool  // in svc.sweep
}

// pool is a pool in the maps. Its content is in the mirrors of pools and slots. There are as many as
// ports, so it is small.
type pool struct {
	port  *port
	slots span // longer than the pool if backends were taken out
	table span
	draft *draft // nil: all of it is written

	id        uint32
	frontends int32 // that lead to it
	// retired is the number of the retirement that waits for a grace period; zero: none.
	retired    uint32
	unverified bool // the table is adopted and was not compared with the planned one
}

// draft is the content of a pool while it is written. No frontend leads to it yet.
type draft struct {
	value   maps.Pool
	slots   []uint32 // the backends, then the table
	members int      // how many of these are the backends
	written int
}

// service returns the Service with this name, which it adds if it is new.
func (r *Reconciler) service(name lb.ServiceName) *service {
	svc := r.services[name]
	if svc == nil {
		svc = &service{name: name, plan: &plan{claimant: &lb.Claimant{Name: name}}}
		r.services[name] = svc
	}

	return svc
}

// add adds a port to those of its Service.
func (p *port) add() *port {
	p.number = int32(len(p.svc.ports))
	p.svc.ports = append(p.svc.ports, p)

	return p
}

// ensureWork makes svc.work usable.
func (svc *service) ensureWork() {
	if svc.work == nil {
		svc.work = &work{progress: progress{step: published}}
	}
}

// isCompact reports whether only the frontends of the plan are kept.
func (svc *service) isCompact() bool { return svc.plan.ports == nil && len(svc.plan.frontends) > 0 }

// compact ends the work of a Service that is idle. Unless something of it is being retired, it also
// drops all of the plan but the frontends.
func (svc *service) compact() {
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

// retire queues a frontend in the maps for retireFrontends.
func (svc *service) retire(key maps.FrontendKey) {
	svc.ensureWork()
	when := 1
	if isCatchAll(key) {
		when = 0
	}
	svc.retiring[when] = append(svc.retiring[when], key)
}

// leadsTo returns the pool of a frontend in the maps, or nil.
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

// arrange sorts the backends of p by address: it merges those that were added since the last call.
func (r *Reconciler) arrange(p *port) {
	if int(p.arranged) == len(p.backends) {
		return
	}
	compare := func(a, b uint32) int {
		return cmp.Or(compareEndpoints(r.endpoint(a), r.endpoint(b)), cmp.Compare(a, b))
	}
	added := p.backends[p.arranged:]
	slices.SortFunc(added, compare)
	r.spend(len(p.backends) * costSlot)
	added = slices.Clone(added)
	for to, old := len(p.backends)-1, int(p.arranged); len(added) > 0; to-- {
		if last := len(added) - 1; old > 0 && compare(p.backends[old-1], added[last]) > 0 {
			old--
			p.backends[to] = p.backends[old]
		} else {
			p.backends[to], added = added[last], added[:last]
		}
	}
	p.arranged = int32(len(p.backends))
}

// members returns the backends of a pool, ascending by id, and the value that the array of pools
// has, or will have.
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

// owned reports whether the Service owns a frontend of p.
func (p *port) owned() bool { return p.planned != nil && p.planned.owned > 0 }

// restricted reports whether a pool of p admits source ranges only, a pool included that waits for
// the end of a grace period.
func (r *Reconciler) restricted(p *port) bool {
	return slices.ContainsFunc(p.pools, func(pl *pool) bool {
		return r.pools.at(pl.id).Flags&maps.PoolSourceRanges != 0
	})
}

// mayBeUDP reports whether UDP sockets may be connected through p. A port without a name may be of
// any protocol.
func (p *port) mayBeUDP() bool { return p.protocol == lb.UDP || p.svc.name == nameless }

// label returns the value of service_ports at p.id.
func (p *port) label() maps.ServicePort {
	return maps.ServicePortOf(p.svc.name.Namespace, p.svc.name.Name, p.name, uint8(p.protocol), uint8(p.family))
}

func compareNames(a, b lb.ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareServices(a, b *service) int { return compareNames(a.name, b.name) }
