package reconcile

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// plan makes svc want what res says. It writes nothing; what it gives ids to
// and nobody ends up wanting, sweep forgets.
func (r *Reconciler) plan(svc *service, res lb.Resolution) {
	r.release(svc)
	for _, p := range svc.ports {
		p.forget()
	}
	before := svc.claims
	svc.claims = make([]*claim, 0, len(res.Frontends))
	pl := &r.planner
	pl.begin(r, svc)
	for i := range res.Frontends {
		pl.planFrontend(&res.Frontends[i])
	}
	slices.SortStableFunc(svc.claims, func(a, b *claim) int { return catchAllLast(a.frontend, b.frontend) })
	pl.planEndpoints(res.Endpoints)
	pl.end()
	// The old claims go last, so that a frontend never looks unclaimed between.
	for _, c := range before {
		r.unlink(c)
	}
	r.touch(svc)
}

// planner is what one call of plan knows besides. The frontends of a port share their lists, which
// may be long: each list is gone through once, and not once for every frontend.
type planner struct {
	r       *Reconciler
	svc     *service
	ports   map[portName]*port      // of svc
	extents map[backendList]*extent // of the lists gone through; nil: no backends
	ranges  map[rangeList]struct{}  // that have been gone through
}

// begin makes pl ready for svc.
func (pl *planner) begin(r *Reconciler, svc *service) {
	if pl.ports == nil {
		pl.ports = make(map[portName]*port)
		pl.extents = make(map[backendList]*extent)
		pl.ranges = make(map[rangeList]struct{})
	}
	pl.r, pl.svc = r, svc
	for _, p := range svc.ports {
		if name := p.portName(); pl.ports[name] == nil { // the first, if the maps had two
			pl.ports[name] = p
		}
	}
}

// end empties pl, which must not hold on to a Resolution. Its maps are used again,
// unless they have become large: to empty them would cost every Service that
// follows.
func (pl *planner) end() {
	const large = 64
	if len(pl.ports)+len(pl.extents)+len(pl.ranges) > large {
		*pl = planner{}

		return
	}
	clear(pl.ports)
	clear(pl.extents)
	clear(pl.ranges)
	pl.svc = nil
}

// backendList is a list of backends, by where it is in memory, and what a port
// makes of it.
type backendList struct {
	port   *port
	first  *lb.Backend
	count  int
	tabled bool
}

// rangeList is a list of source ranges, by where it is in memory, for a port.
type rangeList struct {
	port  *port
	first *netip.Prefix
	count int
}

// forget makes p want nothing.
func (p *port) forget() {
	for i := range p.backends {
		p.backends[i].alive = false
	}
	for i := range p.ranges {
		p.ranges[i].wanted = false
	}
}

// catchAllLast orders frontends for publishing: a catch-all refuses what comes
// after it.
func catchAllLast(a, b *frontend) int {
	switch {
	case a.catchAll() == b.catchAll():
		return 0
	case b.catchAll():
		return -1
	default:
		return 1
	}
}

func (pl *planner) planFrontend(want *lb.Frontend) {
	p := pl.port(portName{want.Port.Port, want.Port.Protocol, familyOf(want.Key.Addr)})
	c := &claim{
		port:            p,
		frontend:        pl.r.frontend(keyOf(want.Key)),
		created:         pl.svc.created,
		extent:          pl.planBackends(p, want.Backends, want.Algorithm.Hashes()),
		affinitySeconds: seconds(want.Affinity),
		algorithm:       programmable(want.Algorithm),
		kind:            min(uint8(want.Kind), uint8(len(kindRank)-1)),
	}
	if want.DropIfEmpty && len(want.Backends) == 0 {
		c.flags |= maps.FrontendDropIfEmpty
	}
	if want.Masquerade {
		c.flags |= maps.FrontendMasquerade
	}
	if len(want.SourceRanges) > 0 {
		c.flags |= maps.FrontendSourceRanges
		if want.NodeInRanges {
			c.flags |= maps.FrontendNodeInRanges
		}
	}
	pl.planRanges(p, want.SourceRanges)
	pl.r.link(c)
	pl.svc.claims = append(pl.svc.claims, c)
}

// port returns the port with this name, after giving it an id if it is new.
func (pl *planner) port(name portName) *port {
	p := pl.ports[name]
	if p == nil {
		p = pl.r.addPort(&port{
			svc: pl.svc, name: name.name, protocol: name.protocol, family: name.family,
			id: pl.r.frontendIDs.take(),
		})
		pl.ports[name] = p
	}

	return p
}

// planBackends returns the extent of p with these backends, and with a table if
// tabled; nil for none.
func (pl *planner) planBackends(p *port, want []lb.Backend, tabled bool) *extent {
	if len(want) == 0 {
		return nil
	}
	list := backendList{port: p, first: &want[0], count: len(want), tabled: tabled}
	e, done := pl.extents[list]
	if !done {
		ids := pl.r.planBackends(p, want)
		e = p.extent(ids, tabled)
		pl.extents[list] = e
	}

	return e
}

// planBackends returns the ids of these backends of p, ascending, after giving
// one to those that are new. They are good until the next call.
func (r *Reconciler) planBackends(p *port, want []lb.Backend) []uint32 {
	ids := r.scratch[:0]
	var added []backend // sorted; put among the others at once, which may be many
	if len(p.backends) == 0 {
		added = make([]backend, 0, len(want))
	}
	for i := range want {
		addr, number := maps.AddrOf(want[i].Addr.Addr()), want[i].Addr.Port()
		among := p.backends
		at, known := search(among, addr, number)
		if !known {
			if at, known = search(added, addr, number); !known {
				added = slices.Insert(added, at, backend{addr: addr, port: number, id: r.backendIDs.take()})
			}
			among = added
		}
		among[at].flags = flagsOf(&want[i])
		ids = append(ids, among[at].id)
	}
	p.backends = merge(p.backends, added)
	slices.Sort(ids)
	r.scratch = ids

	return slices.Compact(ids)
}

// planRanges makes p want these source ranges.
func (pl *planner) planRanges(p *port, want []netip.Prefix) {
	if len(want) == 0 {
		return
	}
	list := rangeList{port: p, first: &want[0], count: len(want)}
	if _, done := pl.ranges[list]; done {
		return
	}
	pl.ranges[list] = struct{}{}
	var index map[maps.SourceRangeKey]int // of p.ranges
	for i, prefix := range want {
		key := maps.SourceRangeKeyOf(p.id, prefix.Masked())
		at := i // as a rule, they are those of before
		if at >= len(p.ranges) || p.ranges[at].key != key {
			if index == nil {
				index = p.indexRanges()
			}
			var known bool
			if at, known = index[key]; !known {
				at = len(p.ranges)
				p.ranges = append(p.ranges, sourceRange{key: key})
				index[key] = at
			}
		}
		p.ranges[at].wanted = true
	}
}

// planEndpoints marks the backends that keep their flows.
func (pl *planner) planEndpoints(endpoints []lb.EndpointState) {
	var p *port
	for i := range endpoints {
		e := &endpoints[i]
		if !e.Alive {
			continue
		}
		family := familyOf(e.Addr.Addr())
		if p == nil || p.name != e.Port.Port || p.protocol != e.Port.Protocol || p.family != family {
			if p = pl.ports[portName{e.Port.Port, e.Port.Protocol, family}]; p == nil {
				continue
			}
		}
		if b := p.findBackend(e.Addr); b != nil {
			b.alive = true
		}
	}
}

func flagsOf(b *lb.Backend) uint16 {
	var flags uint16
	if b.Local {
		flags |= maps.BackendLocal
	}
	if b.Terminating {
		flags |= maps.BackendTerminating
	}

	return flags
}

// seconds rounds up, so that no affinity is not what a short one becomes.
func seconds(d time.Duration) uint32 {
	return uint32((max(d, 0) + time.Second - 1) / time.Second)
}
