package reconcile

import (
	"bytes"
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
)

// plan is what a Service wants in the maps: the rows that follow from its resolution, but
// for ids and places. Of a Service at rest, only the frontends are kept; see remake.
type plan struct {
	resolve   func() lb.Resolution // returns what was planned
	claimant  *lb.Claimant         // as which its frontends are claimed
	ports     []plannedPort
	frontends []plannedFrontend // catch-alls last: one refuses what comes after it
}

// portName identifies one port of a Service in one family.
type portName struct {
	name     string
	protocol lb.Protocol
	family   lb.Family
}

// plannedPort is all that a service port id stands for.
type plannedPort struct {
	portName
	backends []plannedBackend // by address
	pools    []plannedPool
	ranges   []netip.Prefix // from which its frontends may be dialled

	// Where the plan is being carried out:
	have  *port // nil: it has no id yet
	owned int   // how many of its frontends the Service owns
}

// plannedBackend is an endpoint that pools lead to, or that is alive: then it keeps the
// flows that it has.
type plannedBackend struct {
	endpoint
	flags  uint32
	pooled bool
	id     uint32 // zero: it is not in the maps
}

// endpoint is where a backend answers.
type endpoint struct {
	addr maps.Addr
	port uint16 // in host byte order
}

func (e endpoint) addrPort() netip.AddrPort { return netip.AddrPortFrom(e.addr.IP(), e.port) }

func compareEndpoints(a, b endpoint) int {
	return cmp.Or(bytes.Compare(a.addr.Bytes[:], b.addr.Bytes[:]), cmp.Compare(a.port, b.port))
}

func endpointOf(a netip.AddrPort) endpoint { return endpoint{maps.AddrOf(a.Addr()), a.Port()} }

// plannedPool is one set of backends, and how to choose among them. Frontends of a service
// port that agree in both share it.
type plannedPool struct {
	settings
	members []int32 // of the port's backends, ascending
	table   []int32 // of the port's backends, by hash; nil: it is small, and made when it is needed

	have  *pool // nil: it is not in the maps
	owned int   // how many of its frontends the Service owns
}

// settings are those of a pool.
type settings struct {
	affinitySeconds uint32
	flags           uint16
	algorithm       uint8
}

// plannedFrontend is one frontend that the Service claims. The number of the claim is where
// it is in the plan.
type plannedFrontend struct {
	key   maps.FrontendKey
	kind  uint8
	owned bool
	port  int32 // of the plan
	pool  int32 // of the port
}

// Planned is what one Service wants, ready to be set.
type Planned struct{ plan *plan }

// PlanOf prepares a resolution for [Reconciler.SetPlanned]. Any goroutine may call it: for a
// Service of ten thousands of frontends or endpoints it takes too long for the one that owns
// the Reconciler. Resolve must return the same at any time: once all is in the maps, a plan is
// not kept, but made again when it is needed.
func PlanOf(res lb.Resolution, resolve func() lb.Resolution) Planned {
	p := planOf(&res)
	p.resolve = resolve

	return Planned{p}
}

// Room returns how many places it takes, should nothing of it be in the maps; none, if
// nothing was planned.
func (p Planned) Room() maps.Room {
	if p.plan == nil {
		return maps.Room{}
	}
	room := maps.Room{Frontends: len(p.plan.frontends), ServicePorts: len(p.plan.ports)}
	for i := range p.plan.ports {
		port := &p.plan.ports[i]
		room.Backends += len(port.backends)
		room.Pools += len(port.pools)
		for j := range port.pools {
			pool := &port.pools[j]
			room.Slots += len(pool.members)
			if maps.Hashes(pool.algorithm) {
				room.Slots += maglev.Size(len(pool.members))
			}
		}
	}

	return room
}

// planOf returns what a Service wants. It takes time in proportion to the resolution: the
// frontends of a port share their lists, which may be long, and each list is gone through
// once for a port.
func planOf(res *lb.Resolution) *plan {
	pl := planner{
		ports: make(map[portName]int32),
		lists: make(map[list]int),
		pools: make(map[poolKey]int32),
	}
	pl.plan.frontends = make([]plannedFrontend, 0, len(res.Frontends))
	for _, catchAll := range []bool{false, true} {
		for i := range res.Frontends {
			if f := &res.Frontends[i]; (f.Key.Port == 0 && f.Key.Protocol == lb.AnyProtocol) == catchAll {
				pl.planFrontend(f)
			}
		}
	}
	pl.planEndpoints(res.Endpoints)
	for i := range pl.plan.ports {
		pl.sortBackends(int32(i))
		pl.plan.ports[i].planTables()
	}

	planned := pl.plan // alone: what it took to plan is not kept

	return &planned
}

type planner struct {
	plan    plan
	ports   map[portName]int32
	perPort []portLists       // of each port
	members [][]int32         // lists of backends, as indices into those of a port
	lists   map[list]int      // which of members
	pools   map[poolKey]int32 // which of a port's pools
	ranges  [2]rangeList      // of which a copy was made last, by whether IPv6
}

// portLists is what a port has so far.
type portLists struct {
	backends map[endpoint]int32 // where they are in its plan
	lists    []int              // which of the planner's members
}

// list is a list of backends of a port, by where it is in memory.
type list struct {
	port  int32
	first *lb.Backend
	count int
}

type poolKey struct {
	port     int32
	backends int
	settings settings
}

// rangeList is a list of source ranges, by where it is in memory, and a copy.
type rangeList struct {
	first *netip.Prefix
	copy  []netip.Prefix
}

func (pl *planner) planFrontend(f *lb.Frontend) {
	at := pl.port(portName{f.Port.Port, f.Port.Protocol, familyOf(f.Key.Addr)})
	s := settings{affinitySeconds: seconds(f.Affinity), algorithm: programmable(f.Algorithm)}
	if f.DropIfEmpty && len(f.Backends) == 0 {
		s.flags |= maps.PoolDropIfEmpty
	}
	if f.Masquerade {
		s.flags |= maps.PoolMasquerade
	}
	if len(f.SourceRanges) > 0 {
		s.flags |= maps.PoolSourceRanges
		if f.NodeInRanges {
			s.flags |= maps.PoolNodeInRanges
		}
		pl.planRanges(at, f.SourceRanges)
	}
	key := poolKey{at, pl.planBackends(at, f.Backends), s}
	p := &pl.plan.ports[at]
	pool, known := pl.pools[key]
	if !known {
		pool = int32(len(p.pools))
		pl.pools[key] = pool
		p.pools = append(p.pools, plannedPool{settings: s, members: pl.members[key.backends]})
	}
	pl.plan.frontends = append(pl.plan.frontends, plannedFrontend{
		key: keyOf(f.Key), kind: uint8(f.Kind), port: at, pool: pool,
	})
}

func (pl *planner) port(name portName) int32 {
	at, known := pl.ports[name]
	if !known {
		at = int32(len(pl.plan.ports))
		pl.ports[name] = at
		pl.plan.ports = append(pl.plan.ports, plannedPort{portName: name})
		pl.perPort = append(pl.perPort, portLists{backends: make(map[endpoint]int32)})
	}

	return at
}

// planBackends returns which of pl.members is this list of a port's backends.
func (pl *planner) planBackends(port int32, want []lb.Backend) int {
	key := list{port: port, count: len(want)}
	if len(want) > 0 {
		key.first = &want[0]
	}
	n, known := pl.lists[key]
	if known {
		return n
	}
	members := make([]int32, len(want))
	for i := range want {
		b := &want[i]
		members[i] = pl.backend(port, b.Addr)
		to := &pl.plan.ports[port].backends[members[i]]
		to.pooled, to.flags = true, flagsOf(b)
	}
	slices.Sort(members)
	members = slices.Compact(members)
	// Lists that are equal, though not the same, make the same pool.
	for _, n := range pl.perPort[port].lists {
		if slices.Equal(pl.members[n], members) {
			pl.lists[key] = n

			return n
		}
	}
	n = len(pl.members)
	pl.lists[key] = n
	pl.perPort[port].lists = append(pl.perPort[port].lists, n)
	pl.members = append(pl.members, members)

	return n
}

// backend returns which backend of a port answers at addr, after adding it if need be.
func (pl *planner) backend(port int32, addr netip.AddrPort) int32 {
	e, p := endpointOf(addr), &pl.plan.ports[port]
	at, known := pl.perPort[port].backends[e]
	if !known {
		at = int32(len(p.backends))
		pl.perPort[port].backends[e] = at
		p.backends = append(p.backends, plannedBackend{endpoint: e})
	}

	return at
}

// planRanges gives a port its source ranges. The frontends of a Service share those of
// their family.
func (pl *planner) planRanges(port int32, want []netip.Prefix) {
	last := &pl.ranges[0]
	if want[0].Addr().Is6() {
		last = &pl.ranges[1]
	}
	p := &pl.plan.ports[port]
	switch {
	case last.first != &want[0] || len(last.copy) != len(want):
		*last = rangeList{&want[0], slices.Clone(want)}
	case len(p.ranges) > 0 && &p.ranges[0] == &last.copy[0]:
		return
	}
	if len(p.ranges) == 0 {
		p.ranges = last.copy

		return
	}
	// Frontends of one port with different ranges: any of them will do.
	known := make(map[netip.Prefix]struct{}, len(p.ranges))
	for _, prefix := range p.ranges {
		known[prefix] = struct{}{}
	}
	p.ranges = slices.Clip(p.ranges)
	for _, prefix := range want {
		if _, twice := known[prefix]; !twice {
			p.ranges = append(p.ranges, prefix)
		}
	}
}

// planEndpoints adds the endpoints that keep their flows although no pool leads to them.
func (pl *planner) planEndpoints(endpoints []lb.EndpointState) {
	for i := range endpoints {
		e := &endpoints[i]
		if !e.Alive {
			continue
		}
		if at, ok := pl.ports[portName{e.Port.Port, e.Port.Protocol, familyOf(e.Addr.Addr())}]; ok {
			pl.backend(at, e.Addr)
		}
	}
}

// sortBackends sorts the backends of a port by address, and adapts the lists of them.
func (pl *planner) sortBackends(port int32) {
	backends := pl.plan.ports[port].backends
	if slices.IsSortedFunc(backends, func(a, b plannedBackend) int { return compareEndpoints(a.endpoint, b.endpoint) }) {
		return
	}
	order := make([]int32, len(backends))
	for i := range order {
		order[i] = int32(i)
	}
	slices.SortFunc(order, func(a, b int32) int { return compareEndpoints(backends[a].endpoint, backends[b].endpoint) })
	sorted, place := make([]plannedBackend, len(backends)), make([]int32, len(backends))
	for to, from := range order {
		sorted[to], place[from] = backends[from], int32(to)
	}
	copy(backends, sorted)
	for _, n := range pl.perPort[port].lists {
		for i, member := range pl.members[n] {
			pl.members[n][i] = place[member]
		}
		slices.Sort(pl.members[n])
	}
}

// largeTable is from how many backends on the table of a pool is planned: then it is made
// beside the goroutine that owns the Reconciler.
const largeTable = 256

// planTables makes the large tables of a port's pools.
func (p *plannedPort) planTables() {
	for i := range p.pools {
		pool := &p.pools[i]
		if !Hashes(pool.algorithm) || len(pool.members) < largeTable {
			continue
		}
		addrs := make([]netip.AddrPort, len(pool.members))
		for i, member := range pool.members {
			addrs[i] = p.backends[member].addrPort()
		}
		table := maglev.Table(addrs)
		pool.table = make([]int32, len(table))
		for i, at := range table {
			pool.table[i] = pool.members[at]
		}
	}
}

// largePlan is from how many rows on a plan is always kept: to make it again would take too
// long for one piece of work.
const largePlan = 1000

// rows returns how many frontends and backends there are in a plan.
func (p *plan) rows() int {
	rows := len(p.frontends)
	for i := range p.ports {
		rows += len(p.ports[i].backends)
	}

	return rows
}

// remake makes a plan whole of which only the frontends were kept.
func (p *plan) remake() {
	res := p.resolve()
	p.ports = planOf(&res).ports
	for i := range p.frontends {
		if f := &p.frontends[i]; f.owned {
			p.ports[f.port].owned++
			p.ports[f.port].pools[f.pool].owned++
		}
	}
}

// claimsAs reports whether two plans claim the same frontends, in the same order, and with
// the same precedence.
func (p *plan) claimsAs(q *plan) bool {
	return p.claimant.Created.Equal(q.claimant.Created) && slices.EqualFunc(p.frontends, q.frontends, func(a, b plannedFrontend) bool {
		return a.key == b.key && a.kind == b.kind
	})
}

func flagsOf(b *lb.Backend) uint32 {
	var flags uint32
	if b.Local {
		flags |= maps.BackendLocal
	}
	if b.Terminating {
		flags |= maps.BackendTerminating
	}

	return flags
}

// seconds rounds up, so that a short affinity does not become none.
func seconds(d time.Duration) uint32 {
	return uint32((max(d, 0) + time.Second - 1) / time.Second)
}

func isCatchAll(k maps.FrontendKey) bool { return k.Port == 0 && k.Proto == 0 }

// keyOf returns k as the map has it.
func keyOf(k lb.FrontendKey) maps.FrontendKey {
	return maps.FrontendKeyOf(k.Addr, k.Port, uint8(k.Protocol), uint8(k.Scope))
}

// modelKey returns k as package lb has it.
func modelKey(k maps.FrontendKey) lb.FrontendKey {
	at := k.AddrPort()

	return lb.FrontendKey{Addr: at.Addr(), Port: at.Port(), Protocol: lb.Protocol(k.Proto), Scope: lb.Scope(k.Scope)}
}

func familyOf(addr netip.Addr) lb.Family { return lb.FamilyOf(addr.Unmap()) }
