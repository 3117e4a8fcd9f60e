package reconcile

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/test/heavy"
)

// life is a Service as large as an object can be, and the changes to it.
type life struct{ *heavy.Service }

func newHeavy(ports, ranges, externalIPs, endpoints int) life {
	return life{heavy.New(ports, ranges, externalIPs, endpoints)}
}

func (h life) resolve() lb.Resolution {
	var all []*lb.EndpointSlice
	for i := range h.Slices {
		all = append(all, &h.Slices[i])
	}

	return lb.Resolve(&h.Service.Service, all, &lb.Node{Name: "n1"})
}

// moveEndpoint gives the first endpoint another address.
func (h life) moveEndpoint() {
	e := &h.Slices[0].Endpoints[0]
	e.Addr = e.Addr.Next()
}

// moveEndpoints gives all endpoints another address, each between two others.
func (h life) moveEndpoints() {
	for _, slice := range h.Slices {
		for i := range slice.Endpoints {
			slice.Endpoints[i].Addr = slice.Endpoints[i].Addr.Next()
		}
	}
}

// moveRanges replaces all source ranges.
func (h life) moveRanges() {
	for i, p := range h.SourceRanges {
		h.SourceRanges[i] = netip.PrefixFrom(p.Addr(), 25)
	}
}

// live creates, changes and deletes h, and calls took after each step.
func (h life) live(t testing.TB, took func(step string)) {
	clock := newTestClock()
	tables := maps.NewFakes(1 << 25).Tables
	r := mustNew(t, tables, clock)
	var res lb.Resolution
	program := func() {
		r.Set(h.Name, time.Time{}, res)
		mustApply(t, r)
		applyAll(t, r, clock)
	}
	took("")
	res = h.resolve()
	took("resolve")
	program()
	took("program")
	h.moveEndpoint()
	res = h.resolve()
	took("")
	program()
	took("endpoint")
	h.moveEndpoints()
	res = h.resolve()
	took("")
	program()
	took("endpoints")
	// A new agent starts after another endpoint has moved.
	r = mustNew(t, tables, clock)
	took("adopt")
	h.moveEndpoint()
	res = h.resolve()
	took("")
	program()
	took("again")
	if len(h.SourceRanges) > 0 {
		h.moveRanges()
		res = h.resolve()
		took("")
		program()
		took("ranges")
		open := life{&heavy.Service{Service: h.Service.Service, Slices: h.Slices}}
		open.SourceRanges = nil
		res = open.resolve()
		took("")
		program()
		took("no-ranges")
		res = h.resolve()
		program()
		took("")
	}
	r.Delete(h.Name)
	mustApply(t, r)
	applyAll(t, r, clock)
	took("delete")
}

// heavyTime is how long the processor may work for one heavy Service. It takes a
// tenth of it, with the race detector a half; work that grows with the square of
// the object takes more than all of it.
const heavyTime = 20 * time.Second

// The cost of a Service grows linearly with its object.
func TestHeavyServices(t *testing.T) {
	for _, test := range []struct {
		name                                  string
		ports, ranges, externalIPs, endpoints int
	}{
		{name: "many source ranges", ports: 10, ranges: 20_000, endpoints: 2},
		{name: "many external IPs", ports: 5, externalIPs: 15_000, endpoints: 2},
		{name: "many ports", ports: 20_000, endpoints: 2},
		{name: "many endpoints at many external IPs", ports: 1, externalIPs: 5000, endpoints: 5000},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHeavy(test.ports, test.ranges, test.externalIPs, test.endpoints)
			begin := processorTime(t)
			last := begin
			h.live(t, func(step string) {
				now := processorTime(t)
				if step != "" {
					t.Log(step, now-last)
				}
				last = now
			})
			if took := last - begin; took > heavyTime {
				t.Errorf("took %s, more than %s", took, heavyTime)
			}
		})
	}
}

// A Service of which only half of the backends fit into the map is gone through no more often than
// one that fits.
func TestHeavyServiceWithoutRoom(t *testing.T) {
	h := newHeavy(1, 0, 2000, 5000)
	fakes := maps.NewFakes(1 << 20)
	fakes.Tables.Backends.SetLimit(2501)
	clock := newTestClock()
	r := mustNew(t, fakes.Tables, clock)
	res := h.resolve()

	begin := processorTime(t)
	r.Set(h.Name, time.Time{}, res)
	if err := r.Apply(); !errors.Is(err, maps.ErrFull) {
		t.Errorf("Apply: %v, want a full map", err)
	}
	if took := processorTime(t) - begin; took > heavyTime {
		t.Errorf("took %s, more than %s", took, heavyTime)
	}
	for key, id := range fakes.FrontendIDs.Entries {
		if v := fakes.Pools.Get(fakes.Frontends.Get(id).PoolId); key.Port != 0 && v.SlotCount != 2500 {
			t.Fatalf("%s leads to %d backends, want 2500", modelKey(key), v.SlotCount)
		}
	}
	r.Delete(h.Name)
	applyAll(t, r, clock)
	if left := r.Counters().Fill[maps.NameBackends].Used; left > 0 {
		t.Errorf("%d backends are left", left)
	}
}

// BenchmarkHeavy creates, changes and deletes Services, each at two sizes: the second takes a little
// more than twice the time of the first. It is the processor's time, garbage collection included.
func BenchmarkHeavy(b *testing.B) {
	for _, bench := range []struct {
		what                                  string
		ports, ranges, externalIPs, endpoints int
	}{
		{what: "5000 source ranges of 10 ports", ports: 10, ranges: 5000, endpoints: 2},
		{what: "10000 source ranges of 10 ports", ports: 10, ranges: 10_000, endpoints: 2},
		{what: "25000 external IPs of 5 ports", ports: 5, externalIPs: 25_000, endpoints: 2},
		{what: "50000 external IPs of 5 ports", ports: 5, externalIPs: 50_000, endpoints: 2},
		{what: "5000 ports", ports: 5000, endpoints: 2},
		{what: "10000 ports", ports: 10_000, endpoints: 2},
		{what: "5000 endpoints", ports: 1, endpoints: 5000},
		{what: "10000 endpoints", ports: 1, endpoints: 10_000},
		{what: "250 ports of 1000 endpoints", ports: 250, endpoints: 1000},
		{what: "500 ports of 1000 endpoints", ports: 500, endpoints: 1000},
		{what: "1000 external IPs of 1000 endpoints", ports: 1, externalIPs: 1000, endpoints: 1000},
		{what: "2000 external IPs of 2000 endpoints", ports: 1, externalIPs: 2000, endpoints: 2000},
	} {
		b.Run(bench.what, func(b *testing.B) {
			times := make(map[string]time.Duration)
			n := 0
			for b.Loop() {
				h := newHeavy(bench.ports, bench.ranges, bench.externalIPs, bench.endpoints)
				last := processorTime(b)
				h.live(b, func(step string) {
					now := processorTime(b)
					times[step] += now - last
					last = now
				})
				n++
			}
			delete(times, "")
			for step, d := range times {
				b.ReportMetric(float64(d.Microseconds())/1000/float64(n), step+"-ms")
			}
		})
	}
}

// processorTime returns how long this process has run, on all processors.
func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}

	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
