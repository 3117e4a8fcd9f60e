// Package reconcile makes the maps say what package lb decided. It is the one writer of the
// agent's maps: it gives out ids and places, publishes from the bottom up and retires from
// the top down, so that at any moment, after any write and any failed write, every frontend
// leads to backends that exist.
//
// A Service goes through three files: plan.go (what it wants), publish.go and retire.go (the
// writes). README.md tells the whole story.
package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	stdmaps "maps"
	"net/netip"
	"runtime/debug"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// DefaultSlice is how many map operations an Apply does as a rule: some milliseconds' work.
const DefaultSlice = 2000

// Config is what a [Reconciler] needs.
type Config struct {
	// Tables are the maps. Nothing else writes to them, but programs and package flow to
	// Loads, which are only read.
	Tables maps.Tables
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
	// Slice is after how many map operations Apply returns. Zero means [DefaultSlice].
	Slice int
}

// Validate returns an error if a map is missing or the slice is negative.
func (c Config) Validate() error {
	t := c.Tables
	if t.FrontendIDs == nil || t.Frontends == nil || t.Pools == nil || t.Slots == nil || t.Backends == nil ||
		t.ServicePorts == nil || t.Addrs == nil || t.AddrFilter == nil || t.PortFilter == nil || t.Devices == nil || t.SourceRanges == nil ||
		t.ServiceCIDRs == nil || t.CIDRCovers == nil || t.LocalCIDRs == nil || t.Loads.Array == nil || t.Counts == nil {
		return errors.New("reconcile: a map is missing")
	}
	if c.Slice < 0 {
		return errors.New("reconcile: negative slice")
	}

	return nil
}

// Reconciler is the one writer of the agent's maps. It has no locks: one goroutine owns it.
type Reconciler struct {
	*meter // of this Apply
	slice  int
	clock  clock
	tables maps.Tables

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
	maps         []managed // all of these, from the bottom up
	loads        maps.Loads
	counts       maps.Counts

	frontendPlaces places
	poolPlaces     places
	backendPlaces  places
	portPlaces     places
	spans          spans

	services  map[lb.ServiceName]*service
	claims    lb.Claims[maps.FrontendKey]
	poolsByID []*pool
	uses      []int32 // by place of a backend: pools that lead to it, or did and are in their grace period
	broken    map[maps.FrontendKey]string

	due        []*service            // in turn
	waiting    map[*service]struct{} // until they are tried again
	blocked    map[*service]struct{} // of those, for which a map was full
	retirement retirement
	panics     []error      // of this Apply
	free       func() error // what nothing led to when it was adopted; nil: it is, or waits for a grace period
	gone       Gone
	scratch    []uint32
}

// New returns the writer of cfg.Tables. It adopts what they hold: ids, pools, backends and
// frontends stay as they are until Set, Delete or Prune say otherwise. What it cannot make
// sense of is reported by Drift.
func New(cfg Config) (*Reconciler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	t, m := cfg.Tables, &meter{}
	r := &Reconciler{
		meter: m, slice: cmp.Or(cfg.Slice, DefaultSlice), clock: newClock(cfg.Now), tables: t,
		frontendIDs:  newMirror(t.FrontendIDs, m, frontendIDText),
		sourceRanges: newMirror(t.SourceRanges, m, sourceRangeText),
		devices:      newWhole(newMirror(t.Devices, m, deviceText)),
		serviceCIDRs: newWhole(newMirror(t.ServiceCIDRs, m, cidrText)),
		localCIDRs:   newWhole(newMirror(t.LocalCIDRs, m, cidrText)),
		loads:        t.Loads,
		counts:       t.Counts,
		services:     make(map[lb.ServiceName]*service),
		broken:       make(map[maps.FrontendKey]string),
		waiting:      make(map[*service]struct{}),
		blocked:      make(map[*service]struct{}),
	}
	r.servicePorts = table[uint32, maps.ServicePort]{Table: t.ServicePorts, meter: m, text: servicePortText, want: r.names}
	r.frontends = array[maps.Frontend]{Array: t.Frontends, meter: m, text: frontendText, used: &r.frontendPlaces.used}
	r.pools = array[maps.Pool]{Array: t.Pools, meter: m, text: poolText, used: &r.poolPlaces.used}
	r.slots = array[uint32]{Array: t.Slots, meter: m, text: slotText, used: &r.spans.used}
	r.backends = array[maps.Backend]{Array: t.Backends, meter: m, text: backendText, used: &r.backendPlaces.used}
	r.addrs = newAddrs(newMirror(t.Addrs, m, addrText), t.AddrFilter, t.PortFilter, r.clock)
	r.serviceCIDRs.enters, r.serviceCIDRs.leaves = t.CIDRCovers.Add, t.CIDRCovers.Remove
	r.maps = []managed{
		&r.servicePorts, &r.sourceRanges, r.addrs, r.devices, r.localCIDRs,
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
	if err := r.adopt(); err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}

	return r, nil
}

// Room returns how much of the arrays is used: no place beyond has been so far.
func (r *Reconciler) Room() maps.Room {
	return maps.Room{
		Frontends: int(r.frontendPlaces.next), Pools: int(r.poolPlaces.next), Slots: int(r.spans.next()),
		Backends: int(r.backendPlaces.next), ServicePorts: int(r.portPlaces.next),
	}
}

// Reserve makes places exist in the arrays. A write makes those that it lacks, but then
// everything waits until programs have ended. Any goroutine may call it.
func (r *Reconciler) Reserve(room maps.Room) error { return r.tables.Reserve(room) }

// Set says what one Service wants; Apply writes it. The resolution must be complete
// (endpoints included), and must not change afterwards. Created decides who owns an address
// that two Services claim.
func (r *Reconciler) Set(name lb.ServiceName, created time.Time, res lb.Resolution) {
	r.SetPlanned(name, created, PlanOf(res, func() lb.Resolution { return res }))
}

// SetPlanned does what Set does with the resolution that was planned. It takes over what
// PlanOf returned: each is for one call.
func (r *Reconciler) SetPlanned(name lb.ServiceName, created time.Time, planned Planned) {
	svc := r.service(name)
	svc.wanted = true
	planned.plan.claimant = &lb.Claimant{Name: name, Created: created}
	r.follow(svc, planned.plan)
}

// Delete says that a Service is gone; Apply retires what it had.
func (r *Reconciler) Delete(name lb.ServiceName) {
	if svc := r.services[name]; svc != nil {
		svc.wanted = false
		r.follow(svc, &plan{claimant: &lb.Claimant{Name: name}})
	}
}

// Prune deletes every adopted Service that has not been Set. Call it once every Service has
// been; until then, they keep what an earlier agent gave them, also where a Service that has
// been Set claims the same address. Those to keep are not deleted: they exist, but what they
// want is not known.
func (r *Reconciler) Prune(keep ...lb.ServiceName) {
	for _, svc := range slices.SortedFunc(stdmaps.Values(r.services), compareServices) {
		if svc.adopted && !svc.wanted && !slices.Contains(keep, svc.name) {
			r.Delete(svc.name)
		}
	}
}

// PruneAddrs says what flows have dialled: the addresses that a look at all of them has
// found, which began at begin, a time of [Config].Now. Connections outlive the Service that
// they were made to (CONTRACT 1.11.3), and programs pass a packet to an address that is in no
// map. An address that has lost its last frontend is therefore kept until it is in no such
// look that began after the loss and a grace period. Without calls, such addresses stay.
func (r *Reconciler) PruneAddrs(dialled map[maps.Addr]struct{}, begin time.Time) {
	r.addrs.prune(dialled, r.clock.instant(begin))
}

// SetNodeAddrs says which addresses this node has, on which of its devices, and whether node
// ports answer there ([maps.AddrNodePort]); what else the map says of an address follows from
// that and from the frontends. What was adopted stays until the first call.
func (r *Reconciler) SetNodeAddrs(addrs map[netip.Addr]maps.AddrUse) {
	want := make(map[maps.Addr]maps.AddrUse, len(addrs))
	for addr, v := range addrs {
		v.Flags = v.Flags&maps.AddrNodePort | maps.AddrNode
		want[maps.AddrOf(addr)] = v
	}
	r.addrs.setNode(want)
}

// SetDevices says which devices this node has, by ifindex. What was adopted stays until the
// first call.
func (r *Reconciler) SetDevices(devices map[uint32]maps.Device) {
	want := make(map[uint32]maps.Device, len(devices))
	stdmaps.Copy(want, devices)
	r.devices.replace(want)
}

// SetServiceCIDRs says from which ranges ClusterIPs are allocated: clients of an address in
// them that belongs to no Service are dropped, so call it once the Services are Set. They are
// written when no Service is due. What was adopted stays until the first call.
func (r *Reconciler) SetServiceCIDRs(prefixes []netip.Prefix) {
	r.serviceCIDRs.replace(cidrs(prefixes))
}

// SetLocalCIDRs sets which addresses are those of pods, where detectLocalMode asks for
// them. What was adopted stays until the first call.
func (r *Reconciler) SetLocalCIDRs(prefixes []netip.Prefix) {
	r.localCIDRs.replace(cidrs(prefixes))
}

func cidrs(prefixes []netip.Prefix) map[maps.CIDRKey]uint32 {
	want := make(map[maps.CIDRKey]uint32, len(prefixes))
	for _, prefix := range prefixes {
		want[maps.CIDRKeyOf(prefix.Masked())] = 1
	}

	return want
}

// Apply makes the maps say what was Set, as far as it is due: changes at once, failures after
// a backoff, removals after a grace period. It returns after a number of map operations
// ([Config].Slice), with what failed in them; everything else went on. Next says when Apply
// should be called again. Services that are due take turns: one for which a slice is not
// enough goes on when the others had theirs. Errors of full maps wrap [maps.ErrFull].
func (r *Reconciler) Apply() error {
	r.left = r.slice * costOperation
	now := r.clock.now()
	var failed failures
	if r.free != nil {
		failed.add(r.disarm())
	}
	r.reuse()
	for _, err := range r.panics {
		failed.add(err)
	}
	r.panics = nil
	failed.add(r.addrs.apply(now))
	failed.add(r.devices.apply(now))
	failed.add(r.localCIDRs.apply(now))
	var again []*service // of which the backoff is over
	for svc := range r.waiting {
		if svc.retry.at <= now {
			again = append(again, svc)
		}
	}
	r.touchAll(again)
	for !r.spent() {
		svc := r.nextDue()
		if svc == nil {
			failed.add(r.serviceCIDRs.apply(now))

			break
		}
		failed.add(r.work(svc, now))
	}
	r.left = r.slice * costOperation // for what is Set until the next Apply

	return failed.err()
}

// Next returns when Apply has something to do, and false if it never will unless something
// is Set or a grace period ends.
func (r *Reconciler) Next() (time.Time, bool) {
	at := min(r.addrs.due(), r.devices.due(), r.localCIDRs.due(), r.serviceCIDRs.due())
	if len(r.due) > 0 || r.free != nil || r.retirement.over > 0 || len(r.blocked) > 0 && r.hasRoom() {
		at = 0
	}
	for svc := range r.waiting {
		at = min(at, svc.retry.at)
	}
	if at == never {
		return time.Time{}, false
	}

	return r.clock.time(at), true
}

// touch makes svc due, which may have something to publish, whatever its backoff.
func (r *Reconciler) touch(svc *service) {
	svc.awake()
	svc.restart()
	svc.retry.at = 0
	delete(r.waiting, svc)
	r.wake(svc)
}

// restart has all that svc wants gone through again, once its claims are settled.
func (svc *service) restart() {
	svc.dirty = true
	if svc.step >= publishingBackends {
		svc.progress = progress{step: publishingBackends}
		if svc.rests() {
			svc.step = parting
		}
	}
}

// wake makes svc due, which may have something to retire.
func (r *Reconciler) wake(svc *service) {
	svc.awake()
	if !svc.queued {
		svc.queued = true
		r.due = append(r.due, svc)
	}
}

func (r *Reconciler) touchAll(again []*service) {
	slices.SortFunc(again, compareServices)
	for _, svc := range again {
		r.touch(svc)
	}
}

// nextDue returns the Service whose turn it is, or nil if none is due. When there is none,
// and a map that was full has room again, the Services are due for which it was full.
func (r *Reconciler) nextDue() *service {
	if len(r.due) == 0 && len(r.blocked) > 0 && r.hasRoom() {
		for _, m := range r.maps {
			if m.full().freed {
				*m.full() = room{}
			}
		}
		r.touchAll(slices.Collect(stdmaps.Keys(r.blocked)))
		clear(r.blocked)
	}
	if len(r.due) == 0 {
		return nil
	}
	svc := r.due[0]
	r.due[0] = nil
	r.due = r.due[1:]
	svc.queued = false

	return svc
}

// hasRoom reports whether a map that was full has got room.
func (r *Reconciler) hasRoom() bool {
	return slices.ContainsFunc(r.maps, func(m managed) bool { return m.full().lacks && m.full().freed })
}

// names yields what service_ports was made to say.
func (r *Reconciler) names(yield func(uint32, maps.ServicePort) bool) {
	for _, svc := range r.services {
		for _, p := range svc.ports {
			if p.named && !yield(p.id, p.label()) {
				return
			}
		}
	}
}

// work brings one Service forward, until it is as planned or the operations of this Apply
// are spent. A panic is a failure of this Service.
func (r *Reconciler) work(svc *service, now instant) error {
	if svc.work == nil || svc.adopted && svc.step >= publishingBackends {
		return nil
	}
	if svc.rests() && svc.step == published {
		svc.restart()
	}
	full := svc.dirty && svc.retry.at <= now
	if full && (svc.step < publishingBackends || svc.progress == progress{step: publishingBackends}) {
		svc.failures, svc.blocked = nil, false
	}
	fails, before := svc.fails, len(svc.failures)
	done := false
	err := svc.guard(func() { done = (!full || r.publish(svc, published)) && r.withdraw(svc) && r.sweepPorts(svc) })
	if err != nil {
		svc.fail("internal error", err)
		done = true
	}
	failed := svc.failures[before:]
	switch {
	case !done:
		r.wake(svc)
	case len(svc.failures) > 0 && (full || !svc.dirty || svc.fails > fails):
		r.postpone(svc, now)
	case full:
		svc.dirty, svc.retry, svc.panicked = false, backoff{}, ""
		delete(r.blocked, svc)
	}
	if svc.idle() {
		svc.rest()
		if !svc.wanted && len(svc.ports) == 0 {
			delete(r.services, svc.name)
		}
	}

	return svc.errorOf(failed)
}

// postpone has svc tried again after a while, or when a map has room again that was full.
func (r *Reconciler) postpone(svc *service, now instant) {
	svc.restart()
	svc.retry.fail(now)
	r.waiting[svc] = struct{}{}
	if svc.blocked {
		r.blocked[svc] = struct{}{}
	}
}

// guard does something for svc. It returns an error that tells of a panic, with the stack if
// it is not the same again.
func (svc *service) guard(do func()) (err error) {
	defer func() {
		if why := recover(); why != nil {
			text := fmt.Sprint(why)
			if err = fmt.Errorf("panic again: %s", text); text != svc.panicked {
				err = fmt.Errorf("panic: %s\n%s", text, debug.Stack())
			}
			svc.panicked = text
		}
	}()
	do()

	return nil
}

// Failed writes are tried again after firstRetry, then after twice as long each time, up to
// lastRetry.
const (
	firstRetry = time.Second
	lastRetry  = time.Minute
)

// instant is a moment, as time since the Reconciler was made: unlike the wall clock's it
// never jumps, and unlike a [time.Time] it has eight bytes. Zero is long ago.
type instant time.Duration

// never is later than every moment.
const never = instant(1<<63 - 1)

// clock tells instants.
type clock struct {
	read  func() time.Time
	start time.Time
}

// newClock starts one nanosecond ago, so that now is never the zero instant.
func newClock(read func() time.Time) clock {
	return clock{read: read, start: read().Add(-1)}
}

func (c clock) now() instant { return c.instant(c.read()) }

func (c clock) instant(t time.Time) instant { return instant(t.Sub(c.start)) }

func (c clock) time(i instant) time.Time { return c.start.Add(time.Duration(i)) }

// backoff is when to try again. Its zero value is: now.
type backoff struct {
	at    instant
	delay time.Duration
}

func (b *backoff) fail(now instant) {
	b.delay = min(max(2*b.delay, firstRetry), lastRetry)
	b.at = now + instant(b.delay)
}

// after notes what came of an attempt.
func (b *backoff) after(err error, now instant) {
	if err != nil {
		b.fail(now)
	} else {
		*b = backoff{}
	}
}
