package reconcile

import (
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/test/lab"
)

// clusterIP returns a ClusterIP Service with n endpoints, as lb.Resolve does:
// one port and a catch-all, in both scopes. Number and generation make its
// addresses; of two generations the first endpoint differs.
func clusterIP(number, n, generation int) (lb.ServiceName, lb.Resolution) {
	name := lb.ServiceName{Namespace: "default", Name: fmt.Sprint("service-", number)}
	port := lb.PortName{Service: name, Port: "http", Protocol: lb.TCP}
	vip := netip.AddrFrom4([4]byte{10, 96, byte(number >> 8), byte(number)})
	var res lb.Resolution
	backends := make([]lb.Backend, n)
	for i := range backends {
		host := i
		if i == 0 {
			host = n + generation%100
		}
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10 + byte(host>>8), byte(number >> 8), byte(number), byte(host)}), 8080)
		backends[i] = lb.Backend{Addr: addr}
		res.Endpoints = append(res.Endpoints, lb.EndpointState{Port: &port, Addr: addr, Use: lb.Used, Ready: true, Alive: true})
	}
	for _, scope := range []lb.Scope{lb.Internal, lb.External} {
		res.Frontends = append(res.Frontends, lb.Frontend{
			Key:  lb.FrontendKey{Addr: vip, Port: 80, Protocol: lb.TCP, Scope: scope},
			Kind: lb.KindClusterIP, Port: port, Backends: backends,
		})
	}
	for _, scope := range []lb.Scope{lb.Internal, lb.External} {
		res.Frontends = append(res.Frontends, lb.Frontend{
			Key:  lb.FrontendKey{Addr: vip, Scope: scope},
			Kind: lb.KindClusterIP, Port: lb.PortName{Service: name},
		})
	}

	return name, res
}

// written returns how many writes there were: to hash maps, each a system call, to places of
// arrays, and to slots.
func written(r *Reconciler) (calls, places, slots int) {
	for name, w := range r.Counters().Writes {
		switch n := int(w.Puts + w.Deletes); name {
		case maps.NameSlots:
			slots += n
		case maps.NameFrontends, maps.NamePools, maps.NameBackends:
			places += n
		default:
			calls += n
		}
	}

	return calls, places, slots
}

// A change writes only what changed; the writes include what it retires.
func TestWriteCounts(t *testing.T) {
	for _, test := range []struct {
		name                 string
		change               func(*lb.Resolution)
		calls, places, slots int
	}{
		{"nothing changed", func(*lb.Resolution) {}, 0, 0, 0},
		// The backend, the pool, two frontends; then the old pool and the old backend.
		{"an endpoint replaced", func(res *lb.Resolution) { _, *res = clusterIP(1, 10, 1) }, 0, 6, 10},
		{"an endpoint terminating", func(res *lb.Resolution) { res.Frontends[0].Backends[3].Terminating = true }, 0, 1, 0},
		{"affinity", func(res *lb.Resolution) { res.Frontends[0].Affinity = time.Hour }, 0, 2, 10},
		{"an algorithm", func(res *lb.Resolution) { res.Frontends[0].Algorithm = lb.RoundRobin }, 0, 2, 10},
		{"an algorithm with a table, both frontends", func(res *lb.Resolution) {
			res.Frontends[0].Algorithm, res.Frontends[1].Algorithm = lb.SourceHash, lb.Maglev
		}, 0, 5, 2 * (10 + smallTable)},
		{"no endpoints", func(res *lb.Resolution) { _, *res = clusterIP(1, 0, 0) }, 0, 14, 0},
		{"another port", func(res *lb.Resolution) {
			res.Frontends[0].Key.Port, res.Frontends[1].Key.Port = 81, 81
		}, 4, 4, 0},
		{"deleted", func(res *lb.Resolution) { *res = lb.Resolution{} }, 4 + 2 + 1, 4 + 2 + 10, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock := newTestClock()
			r := mustNew(t, maps.NewFakes(1000).Tables, clock)
			name, res := clusterIP(1, 10, 0)
			r.Set(name, time.Time{}, res)
			mustApply(t, r)
			calls, places, slots := written(r)

			test.change(&res)
			r.Set(name, time.Time{}, res)
			mustApply(t, r)
			applyAll(t, r, clock)
			clock.pass(1)
			r.PruneAddrs(nil, clock.now)
			applyAll(t, r, clock)
			callsAfter, placesAfter, slotsAfter := written(r)
			if calls, places, slots = callsAfter-calls, placesAfter-places, slotsAfter-slots; calls != test.calls ||
				places != test.places || slots != test.slots {
				t.Errorf("%d calls, %d places and %d slots written, want %d, %d and %d",
					calls, places, slots, test.calls, test.places, test.slots)
			}
		})
	}
}

// The plan of a Service is not kept once it is in the maps. It is rebuilt when another Service
// begins or ceases to own a frontend that both claim, and not for a change of the Service itself.
func TestPlansAreMadeAgain(t *testing.T) {
	const small, large = 10, largePlan
	for _, test := range []struct {
		name      string
		endpoints int
		again     int // how often a plan is made again when the other Service goes
	}{
		{"small", small, 1},
		{"large", large, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			clock := newTestClock()
			fakes := maps.NewFakes(1 << 14)
			r := mustNew(t, fakes.Tables, clock)
			again := 0
			h := newHeavy(1, 0, 0, test.endpoints)
			set := func(name string, created int64) {
				h.moveEndpoint()
				res := h.resolve()
				r.SetPlanned(lb.ServiceName{Namespace: "default", Name: name}, time.Unix(created, 0), PlanOf(res, func() lb.Resolution {
					again++

					return res
				}))
				mustApply(t, r)
				applyAll(t, r, clock)
			}
			set("a", 2)
			set("a", 2)
			set("b", 3)
			set("a", 2)
			if again != 0 {
				t.Errorf("plans were made again %d times for changes of their own", again)
			}
			for _, svc := range r.services {
				if kept := svc.plan.ports != nil; kept != (test.endpoints == large) {
					t.Errorf("the plan of %s is kept: %t", svc.name, kept)
				}
			}
			r.Delete(lb.ServiceName{Namespace: "default", Name: "a"})
			mustApply(t, r)
			applyAll(t, r, clock)
			if again != test.again {
				t.Errorf("plans were made again %d times, want %d", again, test.again)
			}
			if lines := meaning(fakes); !strings.Contains(fmt.Sprint(lines), " default/b:port-0/") || strings.Contains(fmt.Sprint(lines), " default/a:") {
				t.Errorf("the maps have %v", lines)
			}
		})
	}
}

// costCapacities are room for 10,000 Services with 10 endpoints.
var costCapacities = map[string]uint32{
	maps.NameFrontendIDs: 1 << 16, maps.NameFrontends: 1 << 16, maps.NamePools: 1 << 16,
	maps.NameSlots: 1 << 18, maps.NameBackends: 1 << 18,
	maps.NameServicePorts: 1 << 16, maps.NameAddrs: 1 << 16, maps.NameAffinity: 16, maps.NameUDPPins: 16,
	maps.NameFlows: 16, maps.NameHalfOpen: 16, maps.NameFragments: 16, maps.NameICMPBudgets: 16,
}

// benchmarkTables runs a benchmark on fake and on real maps.
func benchmarkTables(b *testing.B, run func(*testing.B, func() maps.Tables)) {
	b.Run("fake", func(b *testing.B) {
		run(b, func() maps.Tables { return maps.NewFakes(1 << 18).Tables })
	})
	b.Run("real", func(b *testing.B) {
		run(b, func() maps.Tables { return mustCreateTables(b, costCapacities) })
	})
}

// BenchmarkProgram programs 10,000 Services with 10 endpoints each.
func BenchmarkProgram(b *testing.B) {
	benchmarkTables(b, func(b *testing.B, tables func() maps.Tables) {
		names, resolutions := manyServices()
		for b.Loop() {
			b.StopTimer()
			r := mustNew(b, tables(), newTestClock())
			before := heapInUse()
			b.StartTimer()
			for i, name := range names {
				r.Set(name, time.Time{}, resolutions[i])
			}
			mustApply(b, r)
			b.StopTimer()
			calls, places, slots := written(r)
			b.ReportMetric(float64(calls)/float64(len(names)), "calls/service")
			b.ReportMetric(float64(places)/float64(len(names)), "places/service")
			b.ReportMetric(float64(slots)/float64(len(names)), "slots/service")
			b.ReportMetric(float64(heapInUse()-before)/float64(len(names)), "B/service")
			runtime.KeepAlive(r)
			b.StartTimer()
		}
	})
}

func manyServices() ([]lb.ServiceName, []lb.Resolution) {
	names := make([]lb.ServiceName, 10000)
	resolutions := make([]lb.Resolution, len(names))
	for i := range names {
		names[i], resolutions[i] = clusterIP(i, 10, 0)
	}

	return names, resolutions
}

func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)

	return stats.HeapAlloc
}

// BenchmarkEndpoint replaces one endpoint of one Service among 10,000.
func BenchmarkEndpoint(b *testing.B) {
	benchmarkTables(b, func(b *testing.B, tables func() maps.Tables) {
		clock := newTestClock()
		r := mustNew(b, tables(), clock)
		names, resolutions := manyServices()
		for i, name := range names {
			r.Set(name, time.Time{}, resolutions[i])
		}
		mustApply(b, r)
		var changed [2]lb.Resolution
		for generation := range changed {
			_, changed[generation] = clusterIP(77, 10, generation+1)
		}
		before, placesBefore, _ := written(r)
		n := changeInTurn(b, r, names[77], changed)
		calls, places, _ := written(r)
		b.ReportMetric(float64(calls-before)/float64(n), "calls/op")
		b.ReportMetric(float64(places-placesBefore)/float64(n), "places/op")
	})
}

// changeInTurn gives a Service each of two resolutions in turn, until the benchmark ends, and returns how often.
func changeInTurn(b *testing.B, r *Reconciler, name lb.ServiceName, between [2]lb.Resolution) int {
	n := 0
	for b.Loop() {
		r.Set(name, time.Time{}, between[n%2])
		mustApply(b, r)
		r.BeginGrace()
		r.EndGrace()
		mustApply(b, r)
		n++
	}

	return n
}

// BenchmarkHashed adds and removes an endpoint of one Service that hashes, among 10,000 that do not. All that the
// agent's loop does for the change must take 5 ms at most, which no test demands on machines that are busy:
// TestWritesOfHashTables counts what is written instead.
func BenchmarkHashed(b *testing.B) {
	for _, endpoints := range []int{10, 100, 1000, 4000} {
		b.Run(fmt.Sprint(endpoints), func(b *testing.B) {
			clock := newTestClock()
			r, err := New(Config{Tables: mustCreateTables(b, costCapacities), Now: clock.read, Slice: 1 << 30})
			if err != nil {
				b.Fatal(err)
			}
			names, resolutions := manyServices()
			for i, name := range names {
				r.Set(name, time.Time{}, resolutions[i])
			}
			mustApply(b, r)
			var changed [2]lb.Resolution
			for more := range changed {
				_, changed[more] = clusterIP(77, endpoints+more, 1)
				for i := range changed[more].Frontends {
					changed[more].Frontends[i].Algorithm = lb.Maglev
				}
			}
			changeInTurn(b, r, names[77], changed)
		})
	}
}

// A change of an endpoint writes the table of its Service and the list of its backends once, for both frontends, and nothing
// of other Services, however many endpoints there are. The time that it takes is by what is written, see BenchmarkHashed.
func TestWritesOfHashTables(t *testing.T) {
	for _, endpoints := range []int{10, 1000, 4000} {
		t.Run(fmt.Sprint(endpoints), func(t *testing.T) {
			r, err := New(Config{Tables: maps.NewFakes(1 << 18).Tables, Now: newTestClock().read, Slice: 1 << 30})
			lab.Must(t, err)
			set := func(number, endpoints int) {
				name, res := clusterIP(number, endpoints, 1)
				for i := range res.Frontends {
					res.Frontends[i].Algorithm = lb.Maglev
				}
				r.Set(name, time.Time{}, res)
				mustApply(t, r)
			}
			set(1, 10)
			set(2, endpoints)
			calls, places, slots := written(r)
			set(2, endpoints+1)
			callsAfter, placesAfter, slotsAfter := written(r)
			// One backend, one pool, two frontends; then the old pool.
			if got, want := placesAfter-places, 1+1+2+1; got != want || callsAfter != calls {
				t.Errorf("%d places and %d calls, want %d and 0", got, callsAfter-calls, want)
			}
			if got, want := slotsAfter-slots, endpoints+1+maglev.DefaultSize; got != want {
				t.Errorf("%d slots written, want %d", got, want)
			}
		})
	}
}

// What docs/balancing.md says of the memory of tables by hash: of 10,000 Services, the hundred that hash have one each, in the kernel's
// array, whose places take eight bytes, and in the agent's copy of that. An endpoint that is replaced leaves nothing behind.
func TestMemoryOfHashTables(t *testing.T) {
	const hashing, kernel, agent = 100, 8, 4 // bytes of an entry
	clock := newTestClock()
	fakes := maps.NewFakes(1 << 22)
	r, err := New(Config{Tables: fakes.Tables, Now: clock.read})
	lab.Must(t, err)
	names, resolutions := manyServices()
	hash := func(res lb.Resolution) lb.Resolution {
		for i := range res.Frontends {
			res.Frontends[i].Algorithm = lb.Maglev
		}

		return res
	}
	for i, name := range names {
		if i < hashing {
			resolutions[i] = hash(resolutions[i])
		}
		r.Set(name, time.Time{}, resolutions[i])
	}
	entries := func() (n int) {
		for _, pool := range fakes.Pools.All() {
			n += int(pool.TableSize)
		}

		return n
	}
	applyAll(t, r, clock)
	if got, want := entries(), hashing*maglev.DefaultSize; got != want {
		t.Errorf("%d Services that hash have %d entries, want %d", hashing, got, want)
	}
	if size := unsafe.Sizeof(r.slots.have[0]); size != agent {
		t.Errorf("an entry takes %d bytes in the agent, want %d", size, agent)
	}
	used := len(r.slots.have)
	for generation := range 20 {
		name, res := clusterIP(7, 10, generation+1)
		r.Set(name, time.Time{}, hash(res))
		applyAll(t, r, clock)
	}
	if got := entries(); got != hashing*maglev.DefaultSize || len(r.slots.have) > used+2*(maglev.DefaultSize+10) {
		t.Errorf("after 20 changes of a Service there are %d entries, and %d slots have been in use, %d before", got, len(r.slots.have), used)
	}
	text, err := os.ReadFile("../../docs/balancing.md")
	lab.Must(t, err)
	table := maglev.DefaultSize * (kernel + agent)
	want := fmt.Sprintf("%.0f KiB for each port and family with two backends or more, of which %.0f KiB are the agent's: %.0f MiB if %d of 10,000 Services hash",
		float64(table)/(1<<10), float64(maglev.DefaultSize*agent)/(1<<10), float64(hashing*table)/(1<<20), hashing)
	if !strings.Contains(string(text), want) {
		t.Errorf("docs/balancing.md does not say: %s", want)
	}
}

// BenchmarkAdopt starts a new Reconciler on the maps of 10,000 Services, and sets the same Services.
func BenchmarkAdopt(b *testing.B) {
	benchmarkTables(b, func(b *testing.B, tables func() maps.Tables) {
		shared := tables()
		names, resolutions := manyServices()
		for b.Loop() {
			r := mustNew(b, shared, newTestClock())
			for i, name := range names {
				r.Set(name, time.Time{}, resolutions[i])
			}
			r.Prune()
			mustApply(b, r)
		}
	})
}

// BenchmarkDrift compares the maps of 10,000 Services, and reports the longest step.
func BenchmarkDrift(b *testing.B) {
	benchmarkTables(b, func(b *testing.B, tables func() maps.Tables) {
		r := mustNew(b, tables(), newTestClock())
		names, resolutions := manyServices()
		for i, name := range names {
			r.Set(name, time.Time{}, resolutions[i])
		}
		mustApply(b, r)
		var longest time.Duration
		for b.Loop() {
			c, begin := r.Compare(false), time.Now()
			for range c.Steps() {
				longest, begin = max(longest, time.Since(begin)), time.Now()
			}
			if len(c.Found)+len(c.Errs) > 0 {
				b.Fatal(c.Found, c.Errs)
			}
		}
		b.ReportMetric(float64(longest)/float64(time.Millisecond), "ms-longest-step")
	})
}
