// Package reconcile writes what package lb decided to the BPF maps. It is the one writer of the
// agent's maps: it assigns ids and places, publishes from the bottom up and retires from the top
// down, so that at any moment, after any write and any failed write, every frontend leads to
// backends that exist.
//
// A Service goes through three files: plan.go (the rows that it wants), publish.go and retire.go
// (the writes). README.md has the rules that they keep.
package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/pkg/queue"
)

// DefaultSlice is how many map operations an Apply usually does: some milliseconds of work.
const DefaultSlice = 2000

// maxErrors is how many errors one Apply reports in full.
const maxErrors = 10

// Config is what a [Reconciler] needs.
type Config struct {
	// Tables are the maps. Nothing else writes to them, except programs to Health, and programs and
	// package flow to Loads, which this package only reads.
	Tables maps.Tables
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
	// Slice is the number of map operations after which Apply returns. Zero means [DefaultSlice].
	Slice int
	// TableSize is the usual size of tables by hash, one of [maglev.Sizes]. Zero means
	// [maglev.DefaultSize].
	TableSize int
}

// Validate returns an error if a map is missing or the slice is negative.
func (c Config) Validate() error {
	t := c.Tables
	if t.FrontendIDs == nil || t.Frontends == nil || t.Pools == nil || t.Slots == nil || t.Backends == nil ||
		t.ServicePorts == nil || t.Addrs == nil || t.AddrFilter == nil || t.PortFilter == nil || t.Devices == nil || t.SourceRanges == nil ||
		t.ServiceCIDRs == nil || t.CIDRCovers == nil || t.LocalCIDRs == nil || t.OptedOut == nil || t.Loads.Array == nil || t.Health == nil || t.Counts == nil || t.Heartbeat == nil {
		return errors.New("reconcile: a map is missing")
	}
	if c.Slice < 0 {
		return errors.New("reconcile: negative slice")
	}

	return nil
}

// Reconciler is the one writer of the agent's maps. It has no locks: one goroutine owns it.
type Reconciler struct {
	*budget   // of this Apply
	slice     int
	now       func() time.Time
	tableSize int // see [Config]
	tables    maps.Tables

	frontendIDs  mirror[maps.FrontendKey, uint32]
	frontends    array[maps.Frontend]
	pools        array[maps.Pool]
	slots        array[uint32]
	backends     array[maps.Backend]
	servicePorts table[uint32, maps.ServicePort]
	sourceRanges mirror[maps.SourceRangeKey, uint32]
	addrs        *addrs
	devices      *whole[uint32, maps.Device]
	serviceCIDRs *whole[maps.CIDRKey, uint32]
	localCIDRs   *whole[maps.CIDRKey, uint32]
	optedOut     *whole[maps.PodUID, uint32]
	maps         []managed // all of these, from the bottom up
	rooms        []*room   // of what one Service can fill and another can free
	loads        maps.Loads
	counts       maps.Counts

	frontendPlaces places
	poolPlaces     places
	backendPlaces  places
	portPlaces     places
	spans          spans
	departed       departed

	services  map[lb.ServiceName]*service
	claims    lb.Claims[maps.FrontendKey]
	poolsByID []*pool
	broken    map[maps.FrontendKey]string

	due         queue.Turns[*service] // by namespace
	waiting     waiting               // for their backoff to end
	blocked     blocked               // for lack of room
	retirement  retirement
	panics      []error      // of this Apply
	freeAdopted func() error // frees adopted places that nothing led to; nil: done, or queued for a grace period
	gone        Gone

	working *worker // the one that runs; nil: none
	idle    *worker // one that has nothing to do; may be nil
}

// New returns the writer of cfg.Tables. It adopts what they hold: ids, pools, backends and
// frontends stay as they are until Set, Delete or Prune change them. Drift reports entries that
// are inconsistent. A Reconciler is for the life of the process: its coroutines are not collected.
func New(cfg Config) (*Reconciler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	t, m := cfg.Tables, &budget{}
	r := &Reconciler{
		budget: m, slice: cmp.Or(cfg.Slice, DefaultSlice), tableSize: cmp.Or(cfg.TableSize, maglev.DefaultSize), now: cfg.Now, tables: t,
		frontendIDs:  newMirror(t.FrontendIDs, m, frontendIDText),
		sourceRanges: newMirror(t.SourceRanges, m, sourceRangeText),
		devices:      newWhole(newMirror(t.Devices, m, deviceText)),
		serviceCIDRs: newWhole(newMirror(t.ServiceCIDRs, m, cidrText)),
		localCIDRs:   newWhole(newMirror(t.LocalCIDRs, m, cidrText)),
		optedOut:     newWhole(newMirror(t.OptedOut, m, optedOutText)),
		loads:        t.Loads,
		counts:       t.Counts,
		departed:     newDeparted(),
		services:     make(map[lb.ServiceName]*service),
		broken:       make(map[maps.FrontendKey]string),
	}
	// An address that another proxy serves is known before the range that it is in.
	r.serviceCIDRs.order = func(a, b maps.CIDRKey) int { return cmp.Compare(b.PrefixLen, a.PrefixLen) }
	r.servicePorts = table[uint32, maps.ServicePort]{Table: t.ServicePorts, budget: m, text: servicePortText, want: r.names, has: r.hasName}
	r.frontends = array[maps.Frontend]{Array: t.Frontends, budget: m, text: frontendText, cost: costOperation, room: &r.frontendPlaces.room, used: &r.frontendPlaces.used}
	r.pools = array[maps.Pool]{Array: t.Pools, budget: m, text: poolText, cost: costOperation, room: &r.poolPlaces.room, used: &r.poolPlaces.used}
	r.slots = array[uint32]{Array: t.Slots, budget: m, text: slotText, cost: costSlot, room: &r.spans.room, used: &r.spans.used}
	r.backends = array[maps.Backend]{Array: t.Backends, budget: m, text: backendText, cost: costOperation, room: &r.backendPlaces.room, used: &r.backendPlaces.used}
	r.addrs = newAddrs(newMirror(t.Addrs, m, addrText), t.AddrFilter, t.PortFilter, r.now)
	cover := func(change func(maps.CIDRKey)) func(maps.CIDRKey) {
		return func(k maps.CIDRKey) {
			if isCovered(k) {
				change(k)
			}
		}
	}
	r.serviceCIDRs.onAdd, r.serviceCIDRs.onRemove = cover(t.CIDRCovers.Add), cover(t.CIDRCovers.Remove)
	r.maps = []managed{
		&r.servicePorts, &r.sourceRanges, r.addrs, r.devices, r.localCIDRs, r.optedOut,
		&r.backends, &r.slots, &r.pools, &r.frontends, &r.frontendIDs, r.serviceCIDRs,
	}
	r.claims.Moved = r.moved
	r.left = r.slice * costOperation
	r.frontendPlaces = places{what: maps.NameFrontends, limit: t.Frontends.Limit}
	r.poolPlaces = places{what: maps.NamePools, limit: t.Pools.Limit}
	r.backendPlaces = places{
		what: maps.NameBackends, limit: t.Backends.Limit, generations: []uint8{0}, spare: sparePlaces,
		busy: func(place uint32) bool { return t.Loads.Load(place) != maps.BackendLoad{} },
	}
	r.portPlaces = places{
		what: maps.NameServicePorts, limit: func() int { return maps.MaxServicePorts }, generations: []uint8{0}, spare: sparePlaces,
	}
	r.spans = newSpans(t.Slots.Limit)
	r.rooms = []*room{
		&r.servicePorts.room, &r.sourceRanges.room, &r.addrs.room, &r.frontendIDs.room,
		&r.frontendPlaces.room, &r.poolPlaces.room, &r.backendPlaces.room, &r.portPlaces.room, &r.spans.room,
	}
	if err := r.adopt(); err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}

	return r, nil
}

// Room returns how many places of each array have ever been used: all places beyond are new.
func (r *Reconciler) Room() maps.Room {
	return maps.Room{
		Frontends: int(r.frontendPlaces.next), Pools: int(r.poolPlaces.next), Slots: int(r.spans.next()),
		Backends: int(r.backendPlaces.next), ServicePorts: int(r.portPlaces.next),
	}
}

// Reserve allocates places in the arrays ahead of the writes. A write allocates what is missing,
// too, but then the writer waits until running programs have ended. Any goroutine may call it.
func (r *Reconciler) Reserve(room maps.Room) error { return r.tables.Reserve(room) }

// One Service may take 1/limitShare of a map, and not more than the maps of the smallest machine would let it have. Arrays
// grow with the cluster and have no capacity to share. Their limit is maxEndpoints for one port: the writer walks over these
// in some milliseconds, which is the longest piece of work that it does not slice.
const (
	limitShare   = 8
	maxEndpoints = 1 << 16
)

// DefaultLimits are how much one Service may take of maps of the sizes in maps.h, or larger ones.
var DefaultLimits = lb.Limits{Frontends: 524288 / limitShare, SourceRanges: 65536 / limitShare, Endpoints: maxEndpoints}

// LimitsOf returns how much of these maps one Service may take: no limit where a map has none.
func LimitsOf(t maps.Tables) lb.Limits {
	return lb.Limits{
		Frontends:    min(t.FrontendIDs.Capacity()/limitShare, DefaultLimits.Frontends),
		SourceRanges: min(t.SourceRanges.Capacity()/limitShare, DefaultLimits.SourceRanges),
		Endpoints:    maxEndpoints,
	}
}

// NodePortAddrs returns the addresses on which node ports answer, by what is written.
func (r *Reconciler) NodePortAddrs() map[netip.Addr]bool {
	answer := make(map[netip.Addr]bool)
	for addr, use := range r.addrs.have {
		if use.Flags&maps.AddrNodePort != 0 {
			answer[addr.IP()] = true
		}
	}

	return answer
}

// ClientIPs returns the addresses by which the node's own processes are clients, by what is written.
func (r *Reconciler) ClientIPs() []netip.Addr {
	here := r.devices.have[maps.DeviceOfNode]
	ips := []netip.Addr{here.SourceV4.IP(), here.SourceV6.IP()}

	return slices.DeleteFunc(ips, netip.Addr.IsUnspecified)
}

// TryWrite returns why the maps cannot be written, by writing the entry of a frontend as it is. If the
// frontend is not in the map, it writes nothing.
func (r *Reconciler) TryWrite(frontend lb.FrontendKey) error {
	key := keyOf(frontend)
	id, ok, err := r.tables.FrontendIDs.Lookup(key)
	if err != nil || !ok {
		return err
	}

	return r.tables.FrontendIDs.Put(key, id)
}

// Set sets the desired state of one Service; Apply writes it. The resolution must be complete
// (endpoints included), and must not change afterwards. Of two Services that claim an address, the one that
// was Set with it first owns it; of those that are Set before Prune, the one to which the maps lead
// already, then the older one.
func (r *Reconciler) Set(name lb.ServiceName, created time.Time, res lb.Resolution) {
	r.SetPlanned(name, created, PlanOf(res, func() lb.Resolution { return res }))
}

// SetPlanned is Set for a resolution that PlanOf has planned already. It takes ownership of the
// plan: each result of PlanOf is for one call.
func (r *Reconciler) SetPlanned(name lb.ServiceName, created time.Time, planned Planned) {
	svc := r.service(name)
	svc.wanted = true
	planned.plan.claimant = &lb.Claimant{Name: name, Created: created}
	r.setPlan(svc, planned.plan)
}

// Delete removes a Service from the desired state; Apply retires what it had.
func (r *Reconciler) Delete(name lb.ServiceName) {
	if svc := r.services[name]; svc != nil {
		svc.wanted = false
		r.setPlan(svc, &plan{claimant: &lb.Claimant{Name: name}})
	}
}

// Prune deletes every adopted Service that has not been Set. Call it once every existing Service
// has been Set: until then adopted Services keep their frontends, even where a Service that has
// been Set claims the same address. Services in keep exist, although their desired state is not
// known, so Prune leaves them alone.
func (r *Reconciler) Prune(keep ...lb.ServiceName) {
	r.claims.Settle()
	for _, svc := range slices.SortedFunc(stdmaps.Values(r.services), compareServices) {
		if svc.adopted && !svc.wanted && !slices.Contains(keep, svc.name) {
			r.Delete(svc.name)
		}
	}
}

// Adopted reports whether a Service has what an earlier process wrote, and was not Set since.
func (r *Reconciler) Adopted(name lb.ServiceName) bool {
	svc := r.services[name]

	return svc != nil && svc.adopted && !svc.wanted
}

// PruneAddrs reports the original destinations of all flows, as a scan found them that started at
// begin, a time of [Config].Now. Connections outlive their Service (CONTRACT 1.11.3), and programs
// do not touch packets to an address that is in no map. An address that has lost its last frontend
// is therefore kept until a scan that started after the loss and a grace period does not
// find it. Without calls, such addresses stay.
func (r *Reconciler) PruneAddrs(originalDsts map[maps.Addr]struct{}, begin time.Time) {
	r.addrs.prune(originalDsts, begin)
}

// SetNodeAddrs sets the addresses of this node, the device of each, and whether node ports answer
// there ([maps.AddrNodePort]); all other flags of an address follow from these and from the
// frontends. Adopted entries stay until the first call.
func (r *Reconciler) SetNodeAddrs(addrs map[netip.Addr]maps.AddrUse) {
	want := make(map[maps.Addr]maps.AddrUse, len(addrs))
	for addr, v := range addrs {
		v.Flags = v.Flags&maps.AddrNodePort | maps.AddrNode
		want[maps.AddrOf(addr)] = v
	}
	r.addrs.setNode(want)
}

// SetLeft sets the addresses of backends that their Services have left, and that connected UDP sockets have
// dialed: programs lead the datagrams of these to other backends. Adopted entries stay until the first call.
func (r *Reconciler) SetLeft(left map[maps.Addr]struct{}) { r.addrs.setLeft(left) }

// SetDevices sets the devices of this node, by ifindex. Adopted entries stay until the first
// call.
func (r *Reconciler) SetDevices(devices map[uint32]maps.Device) {
	want := make(map[uint32]maps.Device, len(devices))
	stdmaps.Copy(want, devices)
	r.devices.replace(want)
}

// SetServiceCIDRs sets the ranges from which ClusterIPs are allocated, and the addresses in them of
// Services that another proxy serves. Programs drop packets to an address in the ranges that no Service
// has, so call it once the Services are Set; Apply writes them when no Service is due. A range of a
// single address drops nothing. Adopted entries stay until the first call.
func (r *Reconciler) SetServiceCIDRs(prefixes []netip.Prefix, others []netip.Addr) {
	want := cidrs(slices.DeleteFunc(slices.Clone(prefixes), netip.Prefix.IsSingleIP))
	for _, addr := range others {
		want[maps.CIDRKeyOf(netip.PrefixFrom(addr, addr.BitLen()))] = maps.CIDROfOtherProxy
	}
	r.serviceCIDRs.replace(want)
}

// isCovered reports whether the filter of service_cidrs has an entry: a single address is an exception
// from a range that is covered.
func isCovered(k maps.CIDRKey) bool { return !k.Prefix().IsSingleIP() }

// SetLocalCIDRs sets the ranges of pod addresses, where detectLocalMode needs them. Adopted
// entries stay until the first call.
func (r *Reconciler) SetLocalCIDRs(prefixes []netip.Prefix) {
	r.localCIDRs.replace(cidrs(prefixes))
}

// SetOptedOut sets the pods of this node whose sockets are left alone, by their UIDs. A text that is
// no UID matches no pod. Adopted entries stay until the first call.
func (r *Reconciler) SetOptedOut(uids []string) {
	want := make(map[maps.PodUID]uint32, 2*len(uids))
	for _, uid := range uids {
		// Systemd separates the parts of a name by dashes.
		for _, text := range []string{uid, strings.ReplaceAll(uid, "-", "_")} {
			if pod, ok := maps.PodUIDOf(text); ok {
				want[pod] = 1
			}
		}
	}
	r.optedOut.replace(want)
}

func cidrs(prefixes []netip.Prefix) map[maps.CIDRKey]uint32 {
	want := make(map[maps.CIDRKey]uint32, len(prefixes))
	for _, prefix := range prefixes {
		want[maps.CIDRKeyOf(prefix.Masked())] = 1
	}

	return want
}

// Apply brings the maps closer to the desired state: changes at once, failed writes after a
// backoff, removals after a grace period. It returns after a number of map operations
// ([Config].Slice) with the errors that occurred; everything that did not fail is written. Next
// returns when to call Apply again. Services that are due take turns: one that needs more than a
// slice continues after the others. So do namespaces: their Services wait for one of each other namespace. Errors of full maps wrap [maps.ErrFull].
func (r *Reconciler) Apply() error {
	r.left = r.slice * costOperation
	now := r.now()
	var errs []error
	fail := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	if r.freeAdopted != nil {
		fail(r.detachBroken())
	}
	r.runAfterGrace()
	errs, r.panics = append(errs, r.panics...), nil
	fail(r.addrs.apply(now))
	fail(r.devices.apply(now))
	fail(r.localCIDRs.apply(now))
	fail(r.optedOut.apply(now))
	r.markAllDirty(r.waiting.over(now))
	for !r.spent() {
		svc := r.nextDue(now)
		if svc == nil {
			fail(r.serviceCIDRs.apply(now))

			break
		}
		fail(r.work(svc, now))
	}
	r.left = r.slice * costOperation // for the claims of what is Set until the next Apply

	if more := len(errs) - maxErrors; more > 0 {
		errs = append(errs[:maxErrors], fmt.Errorf("and %d more Services", more))
	}

	return errors.Join(errs...)
}

// Next returns when Apply has something to do, the zero time if it has now, and false if there is
// nothing until something is Set or a grace period ends.
func (r *Reconciler) Next() (time.Time, bool) {
	if r.due.Len() > 0 || r.freeAdopted != nil || r.retirement.over > 0 {
		return time.Time{}, true
	}
	times := make([]time.Time, 0, 8)
	if r.blocked.haveRoom(r.rooms) {
		times = append(times, r.blocked.tried.Add(roomPause))
	}
	if len(r.waiting) > 0 {
		times = append(times, r.waiting[0].retry.at)
	}
	for _, m := range []interface{ due() (time.Time, bool) }{r.addrs, r.devices, r.localCIDRs, r.optedOut, r.serviceCIDRs} {
		if at, ok := m.due(); ok {
			times = append(times, at)
		}
	}
	if len(times) == 0 {
		return time.Time{}, false
	}

	return slices.MinFunc(times, time.Time.Compare), true
}

// Due reports whether Apply has something to do now.
func (r *Reconciler) Due() bool {
	at, ok := r.Next()

	return ok && !at.After(r.now())
}

// markDirty makes svc due to publish, whatever its backoff.
func (r *Reconciler) markDirty(svc *service) {
	svc.ensureWork()
	svc.dirty = true
	r.waiting.remove(svc)
	svc.retry.at = time.Time{}
	r.enqueue(svc)
}

// enqueue makes svc due.
func (r *Reconciler) enqueue(svc *service) {
	svc.ensureWork()
	if !svc.queued {
		svc.queued = true
		r.due.Add(svc.name.Namespace, svc)
	}
}

// retireLater makes svc due to retire what it does not need any more, once more if it is doing that.
func (r *Reconciler) retireLater(svc *service) {
	r.enqueue(svc)
	svc.again = true
}

func (r *Reconciler) markAllDirty(again []*service) {
	slices.SortFunc(again, compareServices)
	for _, svc := range again {
		r.markDirty(svc)
	}
}

// nextDue returns the Service whose turn it is, or nil. When no Service is due and a map that was
// full has room again, Services that it blocked are due: as many as entries were freed, since each needs one at least.
func (r *Reconciler) nextDue(now time.Time) *service {
	if r.due.Len() == 0 && !now.Before(r.blocked.tried.Add(roomPause)) && r.blocked.haveRoom(r.rooms) {
		r.blocked.tried = now
		r.markAllDirty(r.blocked.next(r.rooms))
	}
	svc, ok := r.due.Next()
	if ok {
		svc.queued = false
	}

	return svc
}

// names yields what was written to service_ports.
func (r *Reconciler) names(yield func(uint32, maps.ServicePort) bool) {
	for _, svc := range r.services {
		for _, p := range slices.Clone(svc.ports) { // ports may come and go while others are yielded
			if p.named && !yield(p.id, p.label()) {
				return
			}
		}
	}
}

// hasName reports whether a name is as it was written to service_ports.
func (r *Reconciler) hasName(id uint32, name maps.ServicePort) bool {
	namespace, service, _ := name.Parts()
	svc := r.services[lb.ServiceName{Namespace: namespace, Name: service}]

	return svc != nil && slices.ContainsFunc(svc.ports, func(p *port) bool { return p.named && p.id == id && p.label() == name })
}

// work does what is due for one Service, until it ends or the budget of this Apply is spent. A panic
// is a failure of this Service alone.
func (r *Reconciler) work(svc *service, now time.Time) error {
	if svc.work == nil || svc.adopted && svc.next == nil && svc.entering == nil {
		return nil
	}
	if svc.worker == nil {
		svc.publishing, svc.failed = svc.dirty && svc.retry.isOver(now), false
		if svc.publishing {
			svc.dirty, svc.failures, svc.blocked, svc.refused, svc.lacksRanges = false, nil, false, 0, false
		}
	}
	before := len(svc.failures)
	for _, room := range r.rooms {
		room.refused = false
	}
	done, failed := r.run(svc, (*Reconciler).carryOut)
	svc.refused |= refusedBy(r.rooms)
	if failed != nil {
		if failed.why == svc.panicked {
			failed.stack = nil
		}
		svc.panicked = failed.why
		svc.fail("internal error", failed)
	}
	err := svc.errorOf(svc.failures[before:])
	if done {
		if svc.publishing && !svc.failed {
			svc.retry, svc.panicked = backoff{}, ""
			r.blocked.remove(svc)
		}
		svc.publishing = false
	}
	switch {
	case !done || svc.dirty && svc.retry.isOver(now): // it has changed since the turn began
		r.enqueue(svc)
	case svc.failed:
		svc.dirty = true
		svc.retry.fail(now)
		r.waiting.add(svc)
		r.blocked.add(svc)
	case svc.again || len(svc.retiring[0])+len(svc.retiring[1]) > 0: // that came too late for this turn
		r.enqueue(svc)
	case !svc.dirty:
		svc.work = nil
		if svc.plan.rows() < largePlan {
			svc.plan.ports = nil
		}
		if !svc.wanted && len(svc.ports) == 0 {
			delete(r.services, svc.name)
		}
	}

	return err
}

// Failed writes are tried again after firstRetry, then after twice as long each time, up to
// lastRetry.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// backoff is when to try again. Its zero value is due at once.
type backoff struct {
	at    time.Time
	delay time.Duration
}

func (b *backoff) isOver(now time.Time) bool { return !b.at.After(now) }

func (b *backoff) fail(now time.Time) {
	b.delay = min(max(2*b.delay, firstRetry), lastRetry)
	b.at = now.Add(b.delay)
}

// update records the outcome of an attempt.
func (b *backoff) update(err error, now time.Time) {
	if err != nil {
		b.fail(now)
	} else {
		*b = backoff{}
	}
}
