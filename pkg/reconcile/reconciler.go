// Package reconcile makes the maps say what package lb decided. It is the one
// writer of DESIGN.md §3: it hands out ids and slots, publishes bottom-up and
// retires top-down, so that at any moment, after any write and any failed
// write, every frontend leads to backends that exist.
//
// A Service goes through four files: plan.go (what it wants), claims.go (which
// addresses it gets), publish.go and retire.go (the writes). README.md tells
// the whole story.
package reconcile

import (
	"cmp"
	"errors"
	stdmaps "maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// DefaultGrace is much longer than a program runs.
const DefaultGrace = 500 * time.Millisecond

// Config is what a [Reconciler] needs.
type Config struct {
	// Tables are the maps. Nobody else writes to them, but to Loads, which are
	// only read.
	Tables maps.Tables
	// Grace is how long backends and slots that no frontend leads to any more
	// stay readable, for programs that are still running. Zero means
	// [DefaultGrace].
	Grace time.Duration
	// Now is the clock; nil means [time.Now].
	Now func() time.Time
}

// Validate returns an error if a map is missing or a duration negative.
func (c Config) Validate() error {
	t := c.Tables
	if t.Frontends == nil || t.Slots == nil || t.Backends == nil || t.ServicePorts == nil ||
		t.Addrs == nil || t.Devices == nil || t.SourceRanges == nil || t.ServiceCIDRs == nil || t.LocalCIDRs == nil ||
		t.Loads == nil {
		return errors.New("reconcile: a map is missing")
	}
	if c.Grace < 0 {
		return errors.New("reconcile: negative grace")
	}

	return nil
}

// Reconciler is the one writer of the agent's maps. It has no locks: one
// goroutine owns it.
type Reconciler struct {
	grace time.Duration
	clock clock

	tables      tables
	frontendIDs ids
	backendIDs  backendIDs

	services  map[lb.ServiceName]*service
	frontends map[maps.FrontendKey]*frontend
	broken    map[maps.FrontendKey]string // adopted frontends that lead to nowhere, and why
	ports     map[uint32]*port            // by frontend id

	addrs        addrs
	devices      mirror[uint32, maps.Device]
	serviceCIDRs mirror[maps.CIDRKey, uint32]
	localCIDRs   mirror[maps.CIDRKey, uint32]

	queue   queue
	starved map[*service]struct{} // some map was full for them
	gone    Gone
	planner planner
	scratch []uint32
	// parts has, while one Service is published, what of its extents could be
	// written ([Reconciler.writtenPart]).
	parts map[*extent]*extent
}

// New returns the writer of cfg.Tables. It adopts what they hold: ids, slots,
// backends and frontends stay as they are until Set, Delete or Prune say
// otherwise. What it cannot make sense of is reported by Drift.
func New(cfg Config) (*Reconciler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	r := &Reconciler{
		grace:       cmp.Or(cfg.Grace, DefaultGrace),
		clock:       newClock(cfg.Now),
		tables:      newTables(cfg.Tables),
		frontendIDs: newIDs(),
		backendIDs:  newBackendIDs(cfg.Tables.Loads),
		services:    make(map[lb.ServiceName]*service),
		frontends:   make(map[maps.FrontendKey]*frontend),
		broken:      make(map[maps.FrontendKey]string),
		ports:       make(map[uint32]*port),
		starved:     make(map[*service]struct{}),
	}
	r.addrs = newAddrs(&r.tables.addrs, r.clock, r.grace)
	r.devices = newMirror(&r.tables.devices)
	r.serviceCIDRs = newMirror(&r.tables.serviceCIDRs)
	r.localCIDRs = newMirror(&r.tables.localCIDRs)
	if err := r.adopt(); err != nil {
		return nil, err
	}

	return r, nil
}

// Set says what one Service wants; Apply writes it. The resolution must be
// complete (endpoints included), and is not held on to. Created decides who
// owns an address that two Services claim.
func (r *Reconciler) Set(name lb.ServiceName, created time.Time, res lb.Resolution) {
	svc := r.service(name)
	svc.wanted = true
	svc.created = created
	r.plan(svc, res)
}

// Delete says that a Service is gone; Apply retires what it had.
func (r *Reconciler) Delete(name lb.ServiceName) {
	svc := r.services[name]
	if svc == nil {
		return
	}
	svc.wanted = false
	r.plan(svc, lb.Resolution{})
}

// Prune deletes every adopted Service that has not been Set. Call it once
// every Service has been; until then, they keep what an earlier agent gave
// them, also where a Service that has been Set claims the same address.
func (r *Reconciler) Prune() {
	for _, svc := range slices.SortedFunc(stdmaps.Values(r.services), compareServices) {
		if svc.adopted {
			r.Delete(svc.name)
		}
	}
}

// PruneAddrs says what flows have dialled: the addresses that a look at all of
// them has found, which began at begin, a time of [Config].Now. Connections
// outlive the Service that they were made to (CONTRACT 1.11.3), and programs
// take a packet to an address that no map knows for nobody's. An address that
// has lost its last frontend is therefore kept until it is in no such look that
// began after the loss and the grace period. Without calls, such addresses stay.
func (r *Reconciler) PruneAddrs(dialled map[maps.Addr]struct{}, begin time.Time) {
	r.addrs.prune(dialled, r.clock.instant(begin))
}

// SetNodeAddrs says which addresses this node has, on which of its devices, and
// whether node ports answer there ([maps.AddrNodePort]); what else the map says
// of an address follows from that and from the frontends. What was adopted
// stays until the first call.
func (r *Reconciler) SetNodeAddrs(addrs map[netip.Addr]maps.AddrUse) {
	want := make(map[maps.Addr]maps.AddrUse, len(addrs))
	for addr, v := range addrs {
		v.Flags = v.Flags&maps.AddrNodePort | maps.AddrNode
		want[maps.AddrOf(addr)] = v
	}
	r.addrs.setNode(want)
}

// SetDevices says which devices this node has, by ifindex. What was adopted
// stays until the first call.
func (r *Reconciler) SetDevices(devices map[uint32]maps.Device) {
	want := make(map[uint32]maps.Device, len(devices))
	stdmaps.Copy(want, devices)
	r.devices.set(want)
}

// SetServiceCIDRs says from which ranges ClusterIPs are allocated: clients of an
// address in them that belongs to no Service are dropped, so call it once the
// Services are programmed. What was adopted stays until the first call.
func (r *Reconciler) SetServiceCIDRs(prefixes []netip.Prefix) {
	r.serviceCIDRs.set(cidrs(prefixes))
}

// SetLocalCIDRs sets which addresses are those of pods, where detectLocalMode asks for
// them. What was adopted stays until the first call.
func (r *Reconciler) SetLocalCIDRs(prefixes []netip.Prefix) {
	r.localCIDRs.set(cidrs(prefixes))
}

func cidrs(prefixes []netip.Prefix) map[maps.CIDRKey]uint32 {
	want := make(map[maps.CIDRKey]uint32, len(prefixes))
	for _, prefix := range prefixes {
		want[maps.CIDRKeyOf(prefix.Masked())] = 1
	}

	return want
}

// Apply makes the maps say what was Set, as far as it is due: changes at once,
// failures after a backoff, removals after the grace period. It returns what
// failed in this call; everything else went on, and Next says when Apply
// should be called again. Errors of full maps wrap [maps.ErrFull].
func (r *Reconciler) Apply() error {
	now := r.clock.now()
	var failed failures
	failed.add(r.addrs.apply(now))
	failed.add(r.devices.apply(now))
	failed.add(r.localCIDRs.apply(now))
	for svc := r.next(now); svc != nil; svc = r.next(now) {
		failed.add(r.work(svc))
	}
	failed.add(r.serviceCIDRs.apply(now))

	return failed.err()
}

// next returns the next Service that is due. When there is none, and a map
// that was full has room again, the Services that starved are.
func (r *Reconciler) next(now instant) *service {
	if r.queue.empty(now) && r.tables.fed() {
		for _, svc := range slices.SortedFunc(stdmaps.Keys(r.starved), compareServices) {
			r.touch(svc)
		}
		clear(r.starved)
	}

	return r.queue.pop(now)
}

// work brings one Service forward as far as it gets.
func (r *Reconciler) work(svc *service) error {
	if svc.adopted {
		return nil
	}
	before := len(svc.failures)
	full := svc.dirty && svc.retry.ready(r.clock.now())
	if full {
		svc.failures, before = nil, 0
		svc.dirty = false
		r.publish(svc)
		r.withdraw(svc)
	}
	now := r.clock.now() // not earlier: grace periods begin after the writes
	wake := r.sweep(svc, now)

	failed := svc.failures[before:]
	switch {
	case len(failed) > 0:
		svc.dirty = true
		svc.retry.fail(now)
		r.noteStarved(svc, failed)
	case full:
		svc.retry = backoff{}
		delete(r.starved, svc)
	}
	r.reschedule(svc, wake)

	return svc.errorOf(failed)
}

func (r *Reconciler) noteStarved(svc *service, failed []Failure) {
	full := slices.ContainsFunc(failed, func(f Failure) bool { return errors.Is(f.Err, maps.ErrFull) })
	if full {
		r.starved[svc] = struct{}{}
	}
}

// reschedule queues svc for when it has something to do, or forgets it if it
// never will.
func (r *Reconciler) reschedule(svc *service, wake instant) {
	if svc.dirty {
		wake = earlier(wake, svc.retry.at)
	}
	switch {
	case wake != never:
		r.queue.add(svc, wake)
	case !svc.wanted && svc.empty():
		delete(r.services, svc.name)
		delete(r.starved, svc)
	}
}

// touch makes svc due now, whatever its backoff.
func (r *Reconciler) touch(svc *service) {
	svc.dirty = true
	svc.retry.at = 0
	r.queue.add(svc, 0)
}

// Next returns when Apply has something to do, and false if it never will
// unless something is Set.
func (r *Reconciler) Next() (time.Time, bool) {
	at := min(r.queue.first(), r.addrs.due(), r.devices.due(), r.serviceCIDRs.due(), r.localCIDRs.due())
	if at == never {
		return time.Time{}, false
	}

	return r.clock.time(at), true
}
