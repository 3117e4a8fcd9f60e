package reconcile

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
)

// However many entries there are, a step of a comparison looks at few: changes have their turns in between.
func TestComparisonHasSmallSteps(t *testing.T) {
	fakes := maps.NewFakes(1 << 14)
	r := mustNew(t, fakes.Tables, newTestClock())
	for i := range 2000 {
		name, res := clusterIP(i, 3, 0)
		r.Set(name, time.Time{}, res)
	}
	mustApply(t, r)
	least := 2*len(fakes.FrontendIDs.Entries) + 2*len(fakes.ServicePorts.Entries) + 2*len(fakes.Addrs.Entries) + // read, and wanted
		len(fakes.Addrs.Entries) + len(fakes.FrontendIDs.Entries) + // with a filter
		len(r.frontends.have) + len(r.pools.have) + len(r.slots.have) + len(r.backends.have)
	c, steps := r.Compare(false), 0
	for range c.Steps() {
		steps++
	}
	if want := least / 100; len(c.Found)+len(c.Errs) > 0 || steps < want {
		t.Errorf("%d steps for %d keys, want %d at least; found %v, %v", steps, least, want, c.Found, c.Errs)
	}
}

// What the writer changes between two steps is no difference, and what another program changes is one all the same.
func TestChangesDuringAComparison(t *testing.T) {
	clock := newTestClock()
	for _, repair := range []bool{false, true} {
		fakes := maps.NewFakes(1 << 14)
		r := mustNew(t, fakes.Tables, clock)
		random := rand.New(rand.NewPCG(37, 0))
		change := func() {
			name, res := clusterIP(random.IntN(300), random.IntN(4), random.IntN(100))
			if random.IntN(3) == 0 {
				r.Delete(name)
			} else {
				r.Set(name, time.Time{}, res)
			}
			applyAll(t, r, clock)
			if random.IntN(5) == 0 {
				clock.pass(time.Second)
				r.PruneAddrs(nil, clock.now)
				applyAll(t, r, clock)
			}
		}
		for range 400 {
			change()
		}
		for range 20 {
			c := r.Compare(repair)
			for range c.Steps() {
				change()
			}
			if len(c.Found)+len(c.Errs) > 0 {
				t.Fatalf("repair %t: found %v, %v", repair, c.Found, c.Errs)
			}
		}

		stranger := maps.FrontendKeyOf(netip.MustParseAddr("192.0.2.7"), 80, 6, maps.ScopeInternal)
		fakes.FrontendIDs.Entries[stranger] = 9
		name, res := clusterIP(1000, 1, 0)
		r.Set(name, time.Time{}, res)
		applyAll(t, r, clock)
		gone := keyOf(res.Frontends[0].Key)
		delete(fakes.FrontendIDs.Entries, gone)
		c := r.Compare(repair)
		for range c.Steps() {
			change()
		}
		_, strange := fakes.FrontendIDs.Entries[stranger]
		_, back := fakes.FrontendIDs.Entries[gone]
		if len(c.Found) != 2 || len(c.Errs) > 0 || strange == repair || back != repair {
			t.Errorf("repair %t: found %v, %v; it has the stranger's: %t, its own: %t", repair, c.Found, c.Errs, strange, back)
		}
	}
}

// An entry of something else that a Service claims before the comparison comes to it is the Service's.
func TestStrangeEntryIsClaimedMeanwhile(t *testing.T) {
	fakes := maps.NewFakes(1 << 14)
	clock := newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	for i := range 100 {
		name, res := clusterIP(i, 1, 0)
		r.Set(name, time.Time{}, res)
	}
	mustApply(t, r)
	name, res := clusterIP(1000, 1, 0)
	key := keyOf(res.Frontends[0].Key)
	fakes.FrontendIDs.Entries[key] = 9
	for i := range 200 { // so that there are steps between
		fakes.FrontendIDs.Entries[maps.FrontendKeyOf(netip.MustParseAddr("192.0.2.7"), uint16(i+1), 6, maps.ScopeInternal)] = 9
	}
	c := r.Compare(true)
	for range c.Steps() {
		if len(c.stray) == 201 {
			r.Set(name, time.Time{}, res)
			applyAll(t, r, clock)
		}
	}
	if _, there := fakes.FrontendIDs.Entries[key]; !there || len(c.Found) != 200 || len(c.Errs) > 0 {
		t.Errorf("the Service has its frontend: %t; %d are found, want the 200 others: %v", there, len(c.Found), c.Errs)
	}
}

// While ports of a Service go, the name of each that stays is compared: one that differs is restored, not removed.
func TestPortsGoDuringAComparison(t *testing.T) {
	const ports = 200
	some := func(from int) (lb.ServiceName, lb.Resolution) {
		name, res := clusterIP(1, 1, 0)
		frontend := res.Frontends[0]
		res.Frontends = nil
		for i := from; i < ports; i++ {
			frontend.Key.Port, frontend.Port.Port = uint16(i+1), fmt.Sprint("port-", i)
			res.Frontends = append(res.Frontends, frontend)
		}

		return name, res
	}
	fakes, clock := maps.NewFakes(1<<14), newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	name, res := some(0)
	r.Set(name, time.Time{}, res)
	mustApply(t, r)
	for id := range fakes.ServicePorts.Entries {
		fakes.ServicePorts.Entries[id] = maps.ServicePort{}
	}
	c, gone := r.Compare(true), 0
	for range c.Steps() {
		if r.servicePorts.changed != nil {
			gone++
			name, res := some(gone)
			r.Set(name, time.Time{}, res)
			applyAll(t, r, clock)
		}
	}
	if names := len(fakes.ServicePorts.Entries); gone == 0 || names != ports-gone || len(c.Errs) > 0 {
		t.Errorf("after %d ports of %d went, there are %d names; %v", gone, ports, names, c.Errs)
	}
	if found, err := r.Drift(false); len(found) > 0 || err != nil {
		t.Errorf("found %v, %v", found, err)
	}
}

// A range that the writer removes after it was read is no entry of something else, although a look-up of it finds the range
// around it.
func TestRangesGoDuringAComparison(t *testing.T) {
	r := mustNew(t, mustCreateTables(t, costCapacities), newTestClock())
	around := netip.MustParsePrefix("10.0.0.0/8")
	prefixes := []netip.Prefix{around}
	for i := range 300 {
		prefixes = append(prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	r.SetLocalCIDRs(prefixes)
	mustApply(t, r)
	c := r.Compare(false)
	for range c.Steps() {
		if r.localCIDRs.changed != nil {
			r.SetLocalCIDRs([]netip.Prefix{around})
			mustApply(t, r)
		}
	}
	if len(r.localCIDRs.have) != 1 || len(c.Found)+len(c.Errs) > 0 {
		t.Errorf("of %d ranges that are left, it finds %v, %v", len(r.localCIDRs.have), c.Found, c.Errs)
	}
}
