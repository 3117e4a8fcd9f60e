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

// plan is the desired state of a Service in the maps: the rows that follow from its resolution,
// without ids and places. Once all of it is written only the frontends are kept; see rebuild.
type plan struct {
	resolve   func() lb.Resolution // returns the planned resolution again
	claimant  *lb.Claimant         // in whose name its frontends are claimed
	ports     []plannedPort
	frontends []plannedFrontend // catch-alls last: one refuses what comes after it
	ranges    int               // of all ports
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
	ranges   []netip.Prefix // from which clients may connect; frontends and ports share it

	// While the plan is carried out:
	have  *port // nil: it has no id yet
	owned bool  // the Service owns a frontend of it
}

// plannedBackend is a backend of a pool, or an endpoint in no pool that is alive and keeps the
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

// plannedPool is one set of backends and the way to choose among them. Frontends of a service port
// with equal sets and settings share a pool.
type plannedPool struct {
	settings
	members []int32 // of the port's backends, ascending
	table   []int32 // of the port's backends, by hash; nil: small, and made when the pool is written

	have  *pool // nil: it is not in the maps
	owned bool  // the Service owns a frontend of it
}

// settings are how a pool chooses a backend and treats the connection.
type settings struct {
	affinitySeconds uint32
	flags           uint16
	algorithm       uint8
}

// plannedFrontend is one frontend that the Service claims. Its index in the plan numbers the claim.
type plannedFrontend struct {
	key   maps.FrontendKey
	kind  uint8
	owned bool  // the Service owns it; see moved
	port  int32 // of the plan
	pool  int32 // of the port
}

// Planned is the desired state of one Service, ready for [Reconciler.SetPlanned].
type Planned struct{ plan *plan }

// PlanOf prepares a resolution for [Reconciler.SetPlanned]. Any goroutine may call it: Services
// with ten thousands of frontends or endpoints would block the owner of the Reconciler for too long.
// Resolve must always return the same resolution: once a plan is written it is not kept, but
// made again when it is needed.
func PlanOf(res lb.Resolution, resolve func() lb.Resolution) Planned {
	p := planOf(&res)
	p.resolve = resolve

	return Planned{p}
}

// RoomOf returns how many places a plan takes if nothing of it is in the maps, none if p is zero. Any
// goroutine may call it.
func (r *Reconciler) RoomOf(p Planned) maps.Room {
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
				room.Slots += maglev.Size(len(pool.members), r.tableSize)
			}
		}
	}

	return room
}

// planOf returns the plan of a resolution. Its cost is linear in the resolution: the frontends of a
// port share their lists of backends, which may be long, so it goes through each list once per
// port.
func planOf(res *lb.Resolution) *plan {
	pl := planner{number: make(map[portName]int32)}
	ordered := make([]*lb.Frontend, 0, len(res.Frontends))
	for _, catchAll := range []bool{false, true} {
		for i := range res.Frontends {
			if f := &res.Frontends[i]; (f.Key.Port == 0 && f.Key.Protocol == lb.AnyProtocol) == catchAll {
				ordered = append(ordered, f)
				pl.planList(pl.port(portOf(f)), f.Backends)
			}
		}
	}
	for i := range res.Endpoints { // no pool contains them, but they keep their flows
		e := &res.Endpoints[i]
		at, known := pl.number[portName{e.Port.Port, e.Port.Protocol, familyOf(e.Addr.Addr())}]
		if known && e.Alive && e.Use != lb.Used {
			p := &pl.ports[at]
			p.backends = append(p.backends, plannedBackend{endpoint: endpointOf(e.Addr)})
		}
	}
	for i := range pl.ports {
		pl.planBackends(i)
	}
	frontends := make([]plannedFrontend, len(ordered))
	for i, f := range ordered {
		frontends[i] = pl.planFrontend(f)
	}
	for i := range pl.ports {
		p := &pl.ports[i]
		for j := range p.pools {
			if pool := &p.pools[j]; maps.Hashes(pool.algorithm) && len(pool.members) >= largeTable {
				pool.table = p.tableOf(pool.members, maglev.LargeSize)
			}
		}
	}

	ranges := 0
	for i := range pl.ports {
		ranges += len(pl.ports[i].ranges)
	}

	return &plan{ports: pl.ports, frontends: frontends, ranges: ranges}
}

type planner struct {
	ports  []plannedPort
	number map[portName]int32
	lists  [][]backendList // of each port
}

// backendList is a list of backends that frontends of a port share.
type backendList struct {
	backends []lb.Backend
	members  []int32 // of the port's backends, ascending; lists that are equal share it
}

// same reports whether two slices are the same memory.
func same[T any](a, b []T) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

func portOf(f *lb.Frontend) portName {
	return portName{f.Port.Port, f.Port.Protocol, familyOf(f.Key.Addr)}
}

// port returns the index of the port with a name, which it adds if it is new.
func (pl *planner) port(name portName) int32 {
	at, known := pl.number[name]
	if !known {
		at = int32(len(pl.ports))
		pl.number[name] = at
		pl.ports = append(pl.ports, plannedPort{portName: name})
		pl.lists = append(pl.lists, nil)
	}

	return at
}

// list returns the list of a port that shares the memory of backends, or nil.
func (pl *planner) list(port int32, backends []lb.Backend) *backendList {
	for i := range pl.lists[port] {
		if l := &pl.lists[port][i]; same(l.backends, backends) {
			return l
		}
	}

	return nil
}

// planList adds a list and its backends to those of a port, unless it is known.
func (pl *planner) planList(port int32, backends []lb.Backend) {
	if pl.list(port, backends) != nil {
		return
	}
	pl.lists[port] = append(pl.lists[port], backendList{backends: backends})
	p := &pl.ports[port]
	p.backends = slices.Grow(p.backends, len(backends))
	for i := range backends {
		var flags uint32
		if backends[i].Local {
			flags |= maps.BackendLocal
		}
		if backends[i].Terminating {
			flags |= maps.BackendTerminating
		}
		p.backends = append(p.backends, plannedBackend{endpoint: endpointOf(backends[i].Addr), flags: flags, pooled: true})
	}
}

// planBackends sorts the backends of a port by address, removes duplicates, and sets the members of
// the port's lists to indices into them. Equal lists share their members.
func (pl *planner) planBackends(port int) {
	p, lists := &pl.ports[port], pl.lists[port]
	slices.SortStableFunc(p.backends, func(a, b plannedBackend) int { return compareEndpoints(a.endpoint, b.endpoint) })
	all := p.backends[:0]
	for _, b := range p.backends {
		if last := len(all) - 1; last < 0 || all[last].endpoint != b.endpoint {
			all = append(all, b)
		} else if b.pooled {
			all[last] = b
		}
	}
	p.backends = all
	for j := range lists {
		l := &lists[j]
		l.members = make([]int32, len(l.backends))
		at := 0
		for i := range l.backends {
			want := endpointOf(l.backends[i].Addr)
			if at == len(all) || all[at].endpoint != want {
				at, _ = slices.BinarySearchFunc(all, want, func(b plannedBackend, want endpoint) int { return compareEndpoints(b.endpoint, want) })
			}
			l.members[i] = int32(at)
			at++
		}
		slices.Sort(l.members)
		l.members = slices.Compact(l.members)
		for i := range lists[:j] {
			if slices.Equal(lists[i].members, l.members) {
				l.members = lists[i].members
			}
		}
	}
}

// planFrontend adds the pool of a frontend to those of its port, unless there is an equal one.
func (pl *planner) planFrontend(f *lb.Frontend) plannedFrontend {
	at := pl.port(portOf(f))
	s := settings{affinitySeconds: seconds(f.Affinity), algorithm: programmable(f.Algorithm)}
	if f.DropIfEmpty && len(f.Backends) == 0 {
		s.flags |= maps.PoolDropIfEmpty
	}
	if f.PassIfEmpty && len(f.Backends) == 0 {
		s.flags |= maps.PoolPassIfEmpty
	}
	if f.Masquerade {
		s.flags |= maps.PoolMasquerade
	}
	if f.OptedOut {
		s.flags |= maps.PoolOptedOut
	}
	switch f.Healing {
	case lb.HealOff:
		s.flags |= maps.PoolNoEject | maps.PoolNoResteer
	case lb.HealEject:
		s.flags |= maps.PoolNoResteer
	}
	if len(f.SourceRanges) > 0 {
		s.flags |= maps.PoolSourceRanges
		if f.NodeInRanges {
			s.flags |= maps.PoolNodeInRanges
		}
		pl.ports[at].planRanges(f.SourceRanges)
	}
	p, members := &pl.ports[at], pl.list(at, f.Backends).members
	pool := slices.IndexFunc(p.pools, func(pool plannedPool) bool { return pool.settings == s && same(pool.members, members) })
	if pool < 0 {
		pool = len(p.pools)
		p.pools = append(p.pools, plannedPool{settings: s, members: members})
	}

	return plannedFrontend{key: keyOf(f.Key), kind: uint8(f.Kind), port: at, pool: int32(pool)}
}

// planRanges adds source ranges to those of a port. Frontends of a Service usually share one list
// per family.
func (p *plannedPort) planRanges(want []netip.Prefix) {
	if len(p.ranges) == 0 || same(p.ranges, want) {
		p.ranges = want

		return
	}
	// Frontends of one port have different ranges: a client in any of them may connect.
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

// largeTable is the number of backends from which on a table is made with the plan, so that the
// goroutine that owns the Reconciler need not. Such a table is large, whatever size is usual.
const largeTable = maglev.DefaultSize/4 + 1

// tableOf returns the table of some of the port's backends, by hash.
func (p *plannedPort) tableOf(members []int32, usual int) []int32 {
	addrs := make([]netip.AddrPort, len(members))
	for i, member := range members {
		addrs[i] = p.backends[member].addrPort()
	}
	entries := maglev.Table(addrs, usual)
	table := make([]int32, len(entries))
	for i, at := range entries {
		table[i] = members[at]
	}

	return table
}

// largePlan is the number of rows from which on a plan is always kept: rebuilding it would take too
// long for one slice.
const largePlan = 1000

// rows returns the number of frontends and backends in a plan.
func (p *plan) rows() int {
	rows := len(p.frontends)
	for i := range p.ports {
		rows += len(p.ports[i].backends)
	}

	return rows
}

// isCompact reports whether only the frontends of the plan are kept.
func (p *plan) isCompact() bool { return p.ports == nil && len(p.frontends) > 0 }

// rebuild completes a plan of which only the frontends were kept.
func (p *plan) rebuild() {
	res := p.resolve()
	p.ports = planOf(&res).ports
}

// sameClaims reports whether two plans claim the same frontends, in the same order and with the
// same precedence.
func (p *plan) sameClaims(q *plan) bool {
	return p.claimant.Created.Equal(q.claimant.Created) && slices.EqualFunc(p.frontends, q.frontends, func(a, b plannedFrontend) bool {
		return a.key == b.key && a.kind == b.kind
	})
}

// seconds rounds up, so that a short affinity does not become none.
func seconds(d time.Duration) uint32 {
	return uint32((max(d, 0) + time.Second - 1) / time.Second)
}

func isCatchAll(k maps.FrontendKey) bool { return k.Port == 0 && k.Proto == 0 }

// keyOf converts a key of package lb to that of the map.
func keyOf(k lb.FrontendKey) maps.FrontendKey {
	return maps.FrontendKeyOf(k.Addr, k.Port, uint8(k.Protocol), uint8(k.Scope))
}

// modelKey converts a key of the map to that of package lb.
func modelKey(k maps.FrontendKey) lb.FrontendKey {
	at := k.AddrPort()

	return lb.FrontendKey{Addr: at.Addr(), Port: at.Port(), Protocol: lb.Protocol(k.Proto), Scope: lb.Scope(k.Scope)}
}

func familyOf(addr netip.Addr) lb.Family { return lb.FamilyOf(addr.Unmap()) }
