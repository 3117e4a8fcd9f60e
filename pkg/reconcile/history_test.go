package reconcile

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

var (
	firstSeed = flag.Uint64("seed", 0, "first seed of TestNeverDangling")
	seeds     = flag.Uint64("seeds", 200, "how many seeds TestNeverDangling tries")
)

// A packet may arrive between any two writes, and any write may fail. At each such moment every
// frontend must lead to backends that exist, and its address must be marked as a Service's, as must
// the original destination of a flow for as long as the flow lives. When writes no longer fail and
// flows have ended, the maps are as if nothing had failed.
//
// To replay one seed: go test -run TestNeverDangling -seed 17 -seeds 1
func TestNeverDangling(t *testing.T) {
	for seed := *firstSeed; seed < *firstSeed+*seeds; seed++ {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			newHistory(t, seed).run()
		})
	}
}

// history is one random history of a Reconciler.
type history struct {
	*world
	t       *testing.T
	clock   *testClock
	checker *checker
	r       *Reconciler
	failing int               // of 100 writes
	slow    time.Duration     // how long a write takes
	busy    int               // at how many of 100 writes a flow begins, or ends
	look    *look             // the scan of flows that is running
	log     writeLog          // what happened, for who replays a seed
	guests  map[uint32]uint32 // by place: the last backend there
	running bool              // a grace period
	slice   int
	step    int
}

func newHistory(t *testing.T, seed uint64) *history {
	o := &history{world: newWorld(seed), t: t, clock: newTestClock()}
	o.checker = newChecker(maps.NewFakes(20000), o.clock)
	o.failing = o.IntN(4) * 10
	o.busy = 10
	o.guests = make(map[uint32]uint32)
	o.slice = 1 << 30
	if o.chance(50) {
		o.slow = time.Second / 8
	}
	if o.chance(50) {
		o.slice = 1 + o.IntN(30)
	}
	if o.chance(50) {
		o.checker.ranges = make(map[lb.ServiceName][][]netip.Prefix)
	}
	if o.chance(30) {
		o.checker.Tables.Backends.SetLimit(6 + o.IntN(30))
		o.checker.Tables.Frontends.SetLimit(6 + o.IntN(40))
		o.checker.Pools.SetLimit(6 + o.IntN(40))
		o.checker.Slots.SetLimit(10 + o.IntN(300))
		o.checker.ServicePorts.Size = 5 + o.IntN(20)
		o.checker.Addrs.Size = 3 + o.IntN(10)
	}
	o.checker.Observe(o.fail, func(table, operation string) {
		o.checker.check()
		o.clock.pass(o.slow)
		o.grace()
		o.traffic()
		o.changeLoads()
	})
	o.begin()
	if o.chance(50) {
		o.prune() // all Services are new
	}

	return o
}

// begin starts a Reconciler on the maps.
func (o *history) begin() {
	r, err := New(Config{Tables: o.checker.tables(), Now: o.clock.read, Slice: o.slice, TableSize: smallTable})
	if err != nil {
		o.t.Fatal(err)
	}
	o.r, o.checker.owners.writer = r, r
	if o.chance(80) {
		o.r.backendPlaces.spare, o.r.portPlaces.spare = 0, 0
	}
}

// grace begins or ends a grace period. It is called between any two stores.
func (o *history) grace() { // between any two stores
	switch {
	case !o.running && o.r != nil && o.r.Retired() && o.chance(20):
		o.r.BeginGrace()
		o.checker.beginGrace()
		o.running = true
	case o.running && o.chance(20):
		o.checker.endGrace()
		o.r.EndGrace()
		o.running = false
	}
}

var errInjected = errors.New("injected")

func (o *history) fail(table, operation string) error {
	if table == maps.NameSourceRanges && o.checker.ranges != nil {
		return nil // else they may be incomplete
	}
	if o.chance(o.failing) {
		return errInjected
	}

	return nil
}

func (o *history) run() {
	for o.step = range 60 {
		o.randomChange()
		o.examine()
	}
	o.recover()
	o.compareWithFresh()
	o.deleteAll()
}

// randomChange makes one random change.
func (o *history) randomChange() {
	i := o.IntN(len(o.services))
	switch n := o.IntN(100); {
	case n < 60:
		o.set(o.change(i))
	case n < 70:
		o.services[i].exists = false
		o.set(o.services[i])
	case n < 75:
		o.restart()
	case n < 80:
		o.changeNode()
		o.setNode()
	default:
		o.clock.pass(time.Duration(o.IntN(2000)) * time.Millisecond)
	}
	o.traffic()
	if o.chance(50) {
		o.scanFlows()
	}
	if o.chance(80) {
		o.apply()
		o.forgetRanges()
	}
}

func (o *history) apply() {
	o.log.add("step %d: apply at %v", o.step, o.clock.now)
	o.mustNotPanic()
	o.r.Gone()
}

// mustNotPanic calls Apply and fails the test at a panic. Writes may fail.
func (o *history) mustNotPanic() {
	if err := o.r.Apply(); err != nil && strings.Contains(err.Error(), "panic") {
		o.t.Fatal(err)
	}
}

// traffic begins or ends a flow.
func (o *history) traffic() {
	if !o.chance(o.busy) {
		return
	}
	if o.chance(50) {
		o.checker.endFlow(o.Rand)
	} else {
		o.checker.beginFlow(o.Rand)
	}
}

// look is a scan of all flows, as pkg/flow does it.
type look struct {
	begin time.Time
	flows []*checkedFlow // those of its begin
}

// scanFlows starts a scan of all flows, or completes it. It misses flows that began or ended meanwhile.
func (o *history) scanFlows() {
	if o.look == nil {
		o.look = &look{begin: o.clock.now, flows: slices.Clone(o.checker.flows)}

		return
	}
	originalDst := make(map[maps.Addr]struct{})
	for _, f := range o.look.flows {
		if !f.ended {
			originalDst[f.originalDst] = struct{}{}
		}
	}
	o.log.add("step %d: %d addresses are original destinations of flows; those since %v were missed", o.step, len(originalDst), o.look.begin)
	o.r.PruneAddrs(originalDst, o.look.begin)
	o.look = nil
}

// forgetRanges removes the source ranges that Services no longer have from the checker.
func (o *history) forgetRanges() {
	for status := range o.r.Statuses() {
		if !status.Programmed {
			return
		}
	}
	for name, ranges := range o.checker.ranges {
		o.checker.ranges[name] = ranges[len(ranges)-1:]
	}
}

func (o *history) set(s *worldService) {
	o.log.add("step %d: %+v", o.step, *s)
	if s.exists {
		if o.checker.ranges != nil {
			ranges := append(s.sourceRanges(0), s.sourceRanges(1)...)
			o.checker.ranges[s.name] = append(o.checker.ranges[s.name], ranges)
		}
		o.checker.owners.set(s.name, s.created, s.resolve())
		o.r.Set(s.name, s.created, s.resolve())
	} else {
		o.checker.owners.set(s.name, s.created, lb.Resolution{})
		o.r.Delete(s.name)
	}
}

// setNode sets the addresses of the node.
func (o *history) setNode() {
	o.log.add("step %d: node has %v", o.step, o.node)
	o.checker.node = make(map[maps.Addr]maps.AddrUse)
	for addr, use := range o.node {
		use.Flags |= maps.AddrNode
		o.checker.node[maps.AddrOf(addr)] = use
	}
	o.r.SetNodeAddrs(o.node)
}

// restart starts a new Reconciler on the same maps. It gets Services and the node in any order, and
// other changes may come before it has all of them. Programs that ran under the last agent may still run.
func (o *history) restart() {
	o.log.add("step %d: restart", o.step)
	o.look, o.running = nil, false
	o.checker.restart()
	o.begin()
	o.examine()
	for _, i := range o.Perm(len(o.services) + 1) {
		if i == len(o.services) {
			o.setNode()
		} else {
			o.set(o.services[i])
		}
		if o.chance(50) {
			o.clock.pass(time.Duration(o.IntN(1000)) * time.Millisecond)
			o.apply()
		}
	}
	o.prune()
}

func (o *history) prune() {
	o.checker.owners.prune()
	o.r.Prune()
}

// examine fails the test if the checker found an error since the last call.
func (o *history) examine() {
	o.t.Helper()
	if err := o.checker.err(); err != nil {
		if *seeds == 1 {
			o.t.Log(o.log.take())
		}
		o.t.Fatalf("step %d: %v", o.step, err)
	}
	found, err := o.r.Drift(false)
	if len(found) > 0 || err != nil {
		o.t.Fatalf("step %d: drift: %v %v", o.step, found, err)
	}
}

// rest applies everything and ends all flows.
func (o *history) rest() {
	o.applyAll()
	o.checker.flows = nil
	o.clock.pass(1)
	o.r.PruneAddrs(nil, o.clock.now)
	o.applyAll()
	o.examine()
}

// applyAll is [applyAll], and reports grace periods to the checker.
func (o *history) applyAll() {
	for range 100000 {
		if o.running {
			o.checker.endGrace()
			o.r.EndGrace()
			o.running = false
		}
		at, ok := o.r.Next()
		if !ok && !o.r.Retired() {
			return
		}
		if ok && at.After(o.clock.now) {
			o.clock.now = at
		}
		o.mustNotPanic()
		if o.r.Retired() {
			o.r.BeginGrace()
			o.checker.beginGrace()
			o.running = true
		}
	}
	o.t.Fatal("it never comes to rest")
}

// recover stops the failures of writes.
func (o *history) recover() {
	o.slow, o.failing, o.busy = 0, 0, 0
	for place := range uint32(o.checker.Tables.Backends.Len()) {
		_ = o.checker.Loads.Put(place, maps.BackendLoad{})
	}
	o.checker.Tables.Backends.SetLimit(1 << 20)
	o.checker.Tables.Frontends.SetLimit(1 << 20)
	o.checker.Pools.SetLimit(1 << 20)
	o.checker.Slots.SetLimit(20000)
	o.checker.ServicePorts.Size = 0
	o.checker.Addrs.Size = 0
	o.rest()
}

// compareWithFresh compares the maps with those of an agent that begins with the same Services. Where it matters which
// of them claimed a frontend first, each gets what it owns here before the rest.
func (o *history) compareWithFresh() {
	fakes := maps.NewFakes(20000)
	fresh := mustNew(o.t, fakes.Tables, o.clock)
	fresh.SetNodeAddrs(o.node)
	if o.checker.owners.strict {
		fresh.Prune()
		for _, s := range o.services {
			if s.exists {
				fresh.Set(s.name, s.created, o.owned(s))
			}
		}
	}
	for _, i := range o.Perm(len(o.services)) {
		if s := o.services[i]; s.exists {
			fresh.Set(s.name, s.created, s.resolve())
		}
	}
	applyAll(o.t, fresh, o.clock)
	if diff := cmp.Diff(meaning(fakes), meaning(o.checker.Fakes)); diff != "" {
		o.t.Fatalf("not as if programmed afresh (-fresh +have):\n%s", diff)
	}
	o.compareFill(fresh.Counters().Fill, o.r.Counters().Fill)
	for _, s := range o.services {
		have, ok := o.r.Status(s.name)
		want, _ := fresh.Status(s.name)
		if !reflect.DeepEqual(want, have) || ok != s.exists {
			o.t.Errorf("status is %+v, if programmed afresh %+v", have, want)
		}
	}
}

// owned returns what follows from a Service, without the frontends that it has lost.
func (o *history) owned(s *worldService) lb.Resolution {
	res := s.resolve()
	status, _ := o.r.Status(s.name)
	res.Frontends = slices.DeleteFunc(res.Frontends, func(f lb.Frontend) bool {
		return slices.ContainsFunc(status.Lost, func(l Loss) bool { return l.Frontend == f.Key })
	})

	return res
}

// compareFill compares how full the maps are. Backends that drain, and the ids
// of Services that have lost their addresses, are more than a fresh agent has.
func (o *history) compareFill(fresh, have map[string]Fill) {
	more := map[string]bool{maps.NameBackends: true, maps.NameServicePorts: true}
	for name, want := range fresh {
		if used := have[name].Used; used < want.Used || used > want.Used && !more[name] {
			o.t.Errorf("%s: %d in use, %d if programmed afresh", name, used, want.Used)
		}
	}
}

// deleteAll deletes everything, and nothing must be left of it.
func (o *history) deleteAll() {
	for _, s := range o.services {
		o.r.Delete(s.name)
	}
	o.node = nil
	o.setNode()
	o.rest()
	if left := dump(o.t, o.checker.Tables); left != "" {
		o.t.Errorf("left in the maps:\n%s", left)
	}
	r := o.r
	left := len(r.services) + len(r.frontendIDs.have) + len(r.broken) + r.blocked.count() + len(r.waiting) + r.due.Len() +
		len(r.addrs.node) + len(r.addrs.frontends) + len(r.addrs.draining) + len(r.addrs.stale) + r.frontendPlaces.used + r.backendPlaces.used + r.poolPlaces.used + r.portPlaces.used +
		r.spans.used + r.claims.Len() + len(r.retirement.queue)
	if left > 0 {
		o.t.Errorf("left in memory: %d", left)
	}
	for name, fill := range r.Counters().Fill {
		if fill.Used != 0 {
			o.t.Errorf("%s: counts %d in use", name, fill.Used)
		}
	}
}
