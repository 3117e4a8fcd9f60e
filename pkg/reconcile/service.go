package reconcile

import (
	"cmp"
	"net/netip"
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
	lacks  lack // in the turns of blocked; zero: in none

	plan  *plan   // the last one of which all claims are entered
	ports []*port // in the maps
	*work         // nil: the maps are as planned
}

// work is the state of a Service while the maps are not as planned.
type work struct {
	next     *plan // the newest one, until its claims are being entered; may be nil
	entering *plan // replaces plan when its claims are entered; may be nil
	entered  int   // how many of its claims are

	// retiring are frontends in the maps that no Service claims any more: catch-alls, which are
	// deleted first, and others.
	retiring [2][]maps.FrontendKey

	dirty       bool // the plan is to be published
	retry       backoff
	place       int // in Reconciler.waiting, from 1 on; 0: it does not wait
	failures    []Failure
	blocked     bool   // a map was full
	refused     lack   // which maps were
	lacksRanges bool   // that was source_ranges
	panicked    string // the last panic, of which the stack was reported

	// Of the turn:
	worker     *worker // pauses in the middle of it; may be nil
	publishing bool    // it publishes the plan; else it only retires
	failed     bool    // a write has failed
	again      bool    // it has to go through the ports once more
}

// port is one service port in one family, in the maps. There are many, so it is small.
type port struct {
	svc *service
	portName
	backends []uint32 // ids: those of the plan by address, then others by address
	pools    []*pool
	ranges   []maps.SourceRangeKey // those of the plan, then others

	id              uint32
	plannedBackends int32 // how many of backends are those of the plan
	plannedRanges   int32 // how many of ranges are
	planned         bool  // the plan has it
	owned           bool  // the Service owns a frontend of it
	named           bool  // in service_ports
}

// pool is a pool in the maps. Its content is in the mirrors of pools and slots. There are as many as
// ports, so it is small.
type pool struct {
	port  *port
	slots span // longer than the pool if backends were taken out
	table span

	id        uint32
	frontends int32 // that lead to it
	// retired is the number of the retirement that waits for a grace period; zero: none.
	retired    uint32
	unverified bool // the table is adopted and was not compared with the planned one
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

// ensureWork makes svc.work usable.
func (svc *service) ensureWork() {
	if svc.work == nil {
		svc.work = &work{}
	}
}

// programmed reports whether the maps are as planned, except for what is to be retired.
func (svc *service) programmed() bool { return svc.work == nil || !svc.dirty && !svc.publishing }

// retire queues a frontend in the maps for retireFrontends.
func (svc *service) retire(key maps.FrontendKey) {
	svc.ensureWork()
	queue := 1
	if isCatchAll(key) {
		queue = 0
	}
	svc.retiring[queue] = append(svc.retiring[queue], key)
}

// leadsTo returns the pool of a frontend in the maps, or nil.
func (r *Reconciler) leadsTo(key maps.FrontendKey) *pool {
	id, there := r.frontendIDs.have[key]
	if _, broken := r.broken[key]; !there || broken {
		return nil
	}

	return r.poolsByID[r.frontends.at(id).PoolId]
}

// adopter returns the adopted Service that keeps a frontend until it is Set or pruned, or nil.
func (r *Reconciler) adopter(key maps.FrontendKey) *service {
	if to := r.leadsTo(key); to != nil && to.port.svc.adopted && to.port.svc.name != nameless {
		return to.port.svc
	}

	return nil
}

// isAdoptedBy reports whether svc was found in the maps with a frontend.
func (r *Reconciler) isAdoptedBy(svc *service, key maps.FrontendKey) bool {
	return svc.adopted && r.adopter(key) == svc
}

func (r *Reconciler) endpoint(id uint32) endpoint {
	b := r.backends.at(maps.Index(id))

	return endpoint{b.Addr, maps.Port(b.Port)}
}

// backendsByAddress returns the backends of p, those of the plan and others.
func (r *Reconciler) backendsByAddress(p *port) []uint32 {
	planned, others := p.backends[:p.plannedBackends], p.backends[p.plannedBackends:]
	if len(others) == 0 {
		return planned
	}
	all := make([]uint32, 0, len(p.backends))
	for len(planned) > 0 && len(others) > 0 {
		next := &planned
		if compareEndpoints(r.endpoint(others[0]), r.endpoint(planned[0])) < 0 {
			next = &others
		}
		all = append(all, (*next)[0])
		*next = (*next)[1:]
	}
	r.spend(len(all) * costSlot)

	return append(append(all, planned...), others...)
}

// members returns the backends of a pool, ascending by id, and its value.
func (r *Reconciler) members(pl *pool) (ids []uint32, value maps.Pool) {
	value = r.pools.at(pl.id)
	if value.SlotCount == 0 {
		return nil, value
	}

	return r.slots.have[value.SlotBase : value.SlotBase+value.SlotCount], value
}

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

// rangeKey returns the key of a source range of p.
func (p *port) rangeKey(prefix netip.Prefix) maps.SourceRangeKey {
	return maps.SourceRangeKeyOf(p.id, prefix.Masked())
}

// label returns the value of service_ports at p.id.
func (p *port) label() maps.ServicePort {
	return maps.ServicePortOf(p.svc.name.Namespace, p.svc.name.Name, p.name, uint8(p.protocol), uint8(p.family))
}

func compareNames(a, b lb.ServiceName) int {
	return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
}

func compareServices(a, b *service) int { return compareNames(a.name, b.name) }
