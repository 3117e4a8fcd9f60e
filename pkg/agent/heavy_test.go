package agent

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/decision"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/heavy"
	"github.com/sluice-lb/sluice/test/lab"
)

// realLimits are those of the real maps.
func realLimits(a *agent) {
	a.model.node.Limits = reconcile.DefaultLimits
	a.model.state.SetNode(a.model.node)
}

// light is a Service of one port.
func light() lb.Service {
	return lb.Service{
		Name:       lb.ServiceName{Namespace: "ns", Name: "light"},
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.8.8")},
		Families:   []lb.Family{lb.IPv4},
		Ports:      []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80}},
	}
}

// lightSlice has one endpoint, a different one for each n.
func lightSlice(n int) kube.Slice {
	return kube.Slice{EndpointSlice: lb.EndpointSlice{
		Name: lb.SliceName{Namespace: "ns", Name: "light-1"}, Service: light().Name, Family: lb.IPv4,
		Ports: []lb.EndpointPort{{Name: "http", Protocol: lb.TCP, Port: 8080}},
		Endpoints: []lb.Endpoint{
			{Addr: netip.AddrFrom4([4]byte{10, 200, byte(n >> 8), byte(n)}), Ready: true, Serving: true},
		},
	}}
}

func (p *loopScene) set(h *heavy.Service) {
	sinkOf(p.agent).SetService(h.Service, nil)
	for _, s := range h.Slices {
		sinkOf(p.agent).SetSlice(kube.Slice{EndpointSlice: s}, nil)
	}
}

// isDecided reports whether the loop has read all changes of a Service and decided about it.
func (p *loopScene) isDecided(t *testing.T, name lb.ServiceName) bool {
	t.Helper()
	p.mustFinish(t)
	waits, err := queue.Ask(t.Context(), p.queue, func() bool { return p.heavy.Has(name) })
	lab.Must(t, err)

	return !waits
}

// isIdle reports whether no heavy Service is being decided.
func (p *loopScene) isIdle(t *testing.T) bool {
	t.Helper()
	idle, err := queue.Ask(t.Context(), p.queue, func() bool { return !p.heavy.Busy() })
	lab.Must(t, err)

	return idle
}

// inMaps reports whether a Service is in the maps as it was last set.
func (p *loopScene) inMaps(t *testing.T, name lb.ServiceName) bool {
	t.Helper()
	p.mustFinish(t) // and what follows from it is done when the loop comes by again
	is, err := queue.Ask(t.Context(), p.queue, func() bool { return p.isProgrammed(name) })
	lab.Must(t, err)

	return is
}

// change gives the light Service its nth endpoint. It returns how many slices the writer
// wrote until that was in the maps, and how long it took.
func (p *loopScene) change(n int) (written int, took time.Duration) {
	slice := lightSlice(n)
	key := maps.FrontendKeyOf(light().ClusterIPs[0], 80, uint8(lb.TCP), uint8(lb.Internal))
	isInMaps := func() bool {
		id, ok := p.fakes.FrontendIDs.Entries[key]
		if !ok {
			return false
		}
		pool := p.fakes.Pools.Get(p.fakes.Frontends.Get(id).PoolId)
		b, ok := p.fakes.Tables.BackendOf(p.fakes.Slots.Get(pool.SlotBase))

		return ok && pool.SlotCount == 1 && b.AddrPort().Addr() == slice.Endpoints[0].Addr
	}
	begin := time.Now()
	done := make(chan struct{})
	var look func(*model)
	look = func(*model) {
		if isInMaps() {
			written, took = p.slices-written, time.Since(begin)
			close(done)
		} else {
			p.queue.Enqueue(look)
		}
	}
	p.queue.Enqueue(func(m *model) {
		written = p.slices
		m.state.SetSlice(slice.EndpointSlice)
		p.queue.Enqueue(look)
	})
	<-done

	return written, took
}

// heavyServices are as heavy as is allowed, or heavier.
var heavyServices = []struct {
	name                                  string
	ports, ranges, externalIPs, endpoints int
	algorithm                             lb.Algorithm
}{
	{name: "many external IPs", ports: 5, externalIPs: 50_000, endpoints: 2},
	{name: "many ports", ports: 10_000, endpoints: 2},
	{name: "as many source ranges as there may be", ports: 1, ranges: 8191, endpoints: 2},
	{name: "too many source ranges", ports: 10, ranges: 20_000, endpoints: 2},
	{name: "many endpoints", ports: 1, endpoints: 1 << 16},
	{name: "many endpoints with a table", ports: 1, endpoints: 1 << 16, algorithm: lb.Maglev},
	{name: "too many endpoints", ports: 20, endpoints: 10_000},
}

// A heavy Service changes all the time, and another one 20 times. Each of these changes is
// in the maps after a few slices of what the heavy one needs, which is many of them.
// It is these that are counted: time would depend on the machine.
func TestHeavyServiceHoldsUpNoOther(t *testing.T) {
	for _, test := range heavyServices {
		t.Run(test.name, func(t *testing.T) {
			p := mustRunLoopOn(t, maps.NewFakes(1<<23), 0, realLimits)
			sinkOf(p.agent).SetService(light(), nil)
			h := heavy.New(test.ports, test.ranges, test.externalIPs, test.endpoints)
			h.Algorithm = test.algorithm
			most, longest := 0, time.Duration(0)
			overtaken := 0
			for n := range 20 {
				h.Affinity = time.Duration(1+n) * time.Second // all pools are other ones
				h.ExternalIPs = slices.Clone(h.ExternalIPs)
				for i, ip := range h.ExternalIPs {
					addr := ip.As4()
					addr[0] = byte(20 + n%3)
					h.ExternalIPs[i] = netip.AddrFrom4(addr)
				}
				p.set(h)
				if n%2 == 1 { // else the heavy one is still decided
					lab.Eventually(t, "decided", func() bool { return p.isDecided(t, h.Name) })
				}
				written, took := p.change(n)
				most, longest = max(most, written), max(longest, took)
				if !p.inMaps(t, h.Name) {
					overtaken++
				}
			}
			t.Logf("at most %d slices and %v; %d times the heavy one was not in the maps yet", most, longest, overtaken)
			if most > 4 {
				t.Errorf("a change had to wait for %d slices, want 4 at most", most)
			}
			if overtaken == 0 {
				t.Error("the heavy Service was always in the maps first")
			}
			lab.Eventually(t, "the heavy Service in the maps", func() bool { return p.inMaps(t, h.Name) })
			if n := len(p.fakes.FrontendIDs.Entries); n > reconcile.DefaultLimits.Frontends+100 {
				t.Errorf("%d frontends are in the maps", n)
			}
			if n := len(p.fakes.SourceRanges.Entries); n > reconcile.DefaultLimits.SourceRanges {
				t.Errorf("%d source ranges are in the maps", n)
			}
		})
	}
}

// What is refused is an Event, and in what `sluice services` shows, of this Service alone.
func TestHeavyServiceIsReported(t *testing.T) {
	var mu sync.Mutex
	var events []kube.Event
	p := mustRunLoopOn(t, maps.NewFakes(1<<23), 0, func(a *agent) {
		realLimits(a)
		a.model.events = func(e kube.Event) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, e)
		}
	})
	h := heavy.New(5, 0, 50_000, 2)
	p.set(h)
	sinkOf(p.agent).SetService(light(), nil)
	lab.Eventually(t, "the heavy Service in the maps", func() bool { return p.inMaps(t, h.Name) })
	mu.Lock()
	defer mu.Unlock()
	const note = "spec.externalIPs[6551]: from here on 43449 are not in use: with them the Service would have more frontends (addresses x ports x scopes) than the 65536 that one may have"
	if len(events) != 1 || events[0].Service != h.Name || events[0].Note != note || events[0].Reason != kube.ReasonIgnored {
		t.Errorf("reported is %+v", events)
	}
	model, err := p.services(t.Context())
	lab.Must(t, err)
	for svc := range model.Services() {
		if heavy := svc.Name == h.Name.String(); heavy != (len(svc.Problems) == 1) {
			t.Errorf("%s has the problems %v", svc.Name, svc.Problems)
		}
	}
}

// gate blocks a resolver until the test lets it go on.
type gate struct{ begun, goOn chan struct{} }

func newGate() *gate { return &gate{make(chan struct{}), make(chan struct{})} }

// mustGate returns an agent that resolves ns/heavy only when it is let.
func mustGate(t *testing.T) (*loopScene, *gate) {
	t.Helper()
	g := newGate()
	p := mustRunLoopOn(t, maps.NewFakes(1<<20), 0, func(a *agent) {
		a.resolve = func(s lb.Snapshot, m *lb.Memory) lb.Resolution {
			if s.Service.Name.Name == "heavy" && s.Size() >= decision.HeavySize {
				g.begun <- struct{}{}
				<-g.goOn
			}

			return s.ResolveIn(m)
		}
	})

	return p, g
}

// affinityOf returns how long clients of the Service keep their backend, by the maps; zero
// if it is not there.
func (p *loopScene) affinityOf(t *testing.T, name lb.ServiceName) uint32 {
	t.Helper()
	seconds, err := queue.Ask(t.Context(), p.queue, func() uint32 {
		for _, id := range p.fakes.FrontendIDs.Entries {
			pool := p.fakes.Pools.Get(p.fakes.Frontends.Get(id).PoolId)
			port, _, _ := p.fakes.ServicePorts.Lookup(pool.ServicePortId)
			if strings.HasPrefix(port.String(), name.String()+":") {
				return pool.AffinitySeconds
			}
		}

		return 0
	})
	lab.Must(t, err)

	return seconds
}

// While a heavy Service is decided, it may change, go, or become light: what is in the maps
// in the end is what was set last.
func TestHeavyServiceChangesMeanwhile(t *testing.T) {
	for _, test := range []struct {
		name      string
		meanwhile func(*loopScene, *heavy.Service)
		decided   int // times, after the first
		want      uint32
	}{
		{"nothing", func(*loopScene, *heavy.Service) {}, 0, 1},
		{"another change", func(p *loopScene, h *heavy.Service) {
			for n := range 5 {
				h.Affinity = time.Duration(2+n) * time.Second
				sinkOf(p.agent).SetService(h.Service, nil)
			}
		}, 1, 6},
		{"it goes", func(p *loopScene, h *heavy.Service) { sinkOf(p.agent).DeleteService(h.Name) }, 0, 0},
		{"it goes and comes", func(p *loopScene, h *heavy.Service) {
			sinkOf(p.agent).DeleteService(h.Name)
			h.Affinity = 7 * time.Second
			sinkOf(p.agent).SetService(h.Service, nil)
		}, 1, 7},
		{"it becomes light", func(p *loopScene, h *heavy.Service) {
			h.Affinity, h.ExternalIPs = 8*time.Second, nil
			sinkOf(p.agent).SetService(h.Service, nil)
		}, 0, 8},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, g := mustGate(t)
			h := heavy.New(1, 0, decision.HeavySize, 2)
			h.Affinity = time.Second
			p.set(h)
			<-g.begun
			p.mustFinish(t) // the rest of h
			test.meanwhile(p, h)
			sinkOf(p.agent).SetService(light(), nil)
			lab.Eventually(t, "another Service in the maps meanwhile", func() bool { return p.inMaps(t, light().Name) })
			g.goOn <- struct{}{}
			more := test.decided
			if test.name == "nothing" || test.name == "another change" {
				more = 1 // its slice may come after it was begun with
			}
			for done := false; !done; {
				select {
				case <-g.begun:
					more--
					g.goOn <- struct{}{}
				default:
					done = p.isIdle(t) && p.inMaps(t, h.Name)
				}
			}
			if more < 0 {
				t.Errorf("it was decided %d times too often", -more)
			}
			if got := p.affinityOf(t, h.Name); got != test.want {
				t.Errorf("in the maps is a Service of %d seconds, want %d", got, test.want)
			}
		})
	}
}

// While one Service is written without end, the node is healthy and ready, and what load
// balancers ask other Services for is answered.
func TestHeavyServiceIsHealthy(t *testing.T) {
	const slice = 20
	p := mustRunLoopOn(t, maps.NewFakes(1<<20), slice, realLimits)
	h := heavy.New(10, 0, 30, 2) // each change of it takes many slices
	p.set(h)
	rounds := make(chan bool) // whether the writer was busy
	stop := make(chan struct{})
	defer close(stop)
	var again func(*model)
	again = func(m *model) {
		busy := p.writer.Due()
		if p.writer.Programmed(h.Name) {
			busy = true // from now on, again
			h.Affinity += time.Second
			m.state.SetService(h.Service)
		}
		select {
		case rounds <- busy:
		case <-stop:
			return
		}
		p.queue.Enqueue(again)
	}
	p.queue.Enqueue(again)
	mustWork := func(n int) {
		t.Helper()
		for range n {
			if !<-rounds {
				t.Error("the writer has nothing to do")
			}
		}
	}
	<-rounds
	svc := *web()
	svc.HealthCheckNodePort = 32000
	sinkOf(p.agent).SetService(svc, nil)
	mustWork(100)
	for range 5 {
		p.passed.Add(int64(2 * time.Minute))
		mustWork(3)
		if !p.proxy.Healthy() {
			t.Error("unhealthy")
		}
	}
	if !p.known.Load() {
		t.Error("not ready")
	}
	published := make(chan bool, 1)
	p.queue.Enqueue(func(*model) {
		isDue := func() (due bool) {
			p.checks.Publish(func(name lb.ServiceName) bool { due = due || name == svc.Name; return false })

			return due
		}
		waits := isDue()
		p.checks.Plan(svc.Name, nil) // which is due only if the check was published
		published <- !waits && isDue()
	})
	mustWork(3)
	if !<-published {
		t.Error("the health check node port is not known yet")
	}
}

// BenchmarkHeavy measures what a heavy Service costs, each at two sizes: the second takes a
// little more than twice the time of the first. Decide is beside the loop; enforce and the
// longest slice are what another Service waits for.
func BenchmarkHeavy(b *testing.B) {
	for _, bench := range []struct {
		what                                  string
		ports, ranges, externalIPs, endpoints int
		algorithm                             lb.Algorithm
	}{
		{"3275 external IPs of 5 ports", 5, 0, 3275, 2, lb.Random},
		{"6550 external IPs of 5 ports", 5, 0, 6550, 2, lb.Random},
		{"16000 external IPs of 1 port", 1, 0, 16_000, 2, lb.Random},
		{"32000 external IPs of 1 port", 1, 0, 32_000, 2, lb.Random},
		{"50000 external IPs of 5 ports", 5, 0, 50_000, 2, lb.Random},
		{"5000 ports", 5000, 0, 0, 2, lb.Random},
		{"10000 ports", 10_000, 0, 0, 2, lb.Random},
		{"4095 ranges of 1 port", 1, 4095, 0, 2, lb.Random},
		{"8190 ranges of 1 port", 1, 8190, 0, 2, lb.Random},
		{"20000 ranges of 10 ports", 10, 20_000, 0, 2, lb.Random},
		{"32768 endpoints", 1, 0, 0, 1 << 15, lb.Random},
		{"65536 endpoints", 1, 0, 0, 1 << 16, lb.Random},
		{"32768 endpoints by maglev", 1, 0, 0, 1 << 15, lb.Maglev},
		{"65536 endpoints by maglev", 1, 0, 0, 1 << 16, lb.Maglev},
	} {
		b.Run(bench.what, func(b *testing.B) {
			least := make(map[string]time.Duration) // of all rounds: that is without other load
			for b.Loop() {
				h := heavy.New(bench.ports, bench.ranges, bench.externalIPs, bench.endpoints)
				h.Algorithm = bench.algorithm
				times := make(map[string]time.Duration)
				measureHeavy(b, h, times)
				for step, d := range times {
					if before, known := least[step]; !known || d < before {
						least[step] = d
					}
				}
			}
			b.ReportMetric(0, "ns/op")
			for step, d := range least {
				b.ReportMetric(float64(d.Microseconds())/1000, step+"-ms")
			}
		})
	}
}

// measureHeavy adds how long each step takes that programs h, changes an endpoint of it, gives
// it other addresses, and takes it away. A slice is the longest of its step, those after the
// grace period included.
func measureHeavy(b *testing.B, h *heavy.Service, times map[string]time.Duration) {
	b.Helper()
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(1 << 23).Tables})
	lab.Must(b, err)
	a := newAgent(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)},
		parts{queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), writer: writer, limits: reconcile.DefaultLimits})
	a.synced = true
	took := func(step string, do func()) {
		begin := time.Now()
		do()
		times[step] = max(times[step], time.Since(begin))
	}
	write := func(when string) {
		for range 3 {
			for a.writer.Due() {
				took("slice"+when, a.apply)
			}
			a.writer.BeginGrace()
			a.writer.EndGrace()
		}
		took("statuses", func() {
			for range a.writer.Statuses() {
			}
		})
	}
	for _, when := range []string{"", "-endpoint", "-addresses"} {
		for _, s := range h.Slices {
			s.Endpoints = slices.Clone(s.Endpoints)
			if when == "-endpoint" {
				s.Endpoints[0].Addr = s.Endpoints[0].Addr.Next()
			}
			a.model.state.SetSlice(s)
		}
		svc := h.Service
		svc.ExternalIPs = slices.Clone(svc.ExternalIPs)
		for i, ip := range svc.ExternalIPs {
			if addr := ip.As4(); when == "-addresses" {
				addr[0]++
				svc.ExternalIPs[i] = netip.AddrFrom4(addr)
			}
		}
		a.model.state.SetService(svc)
		s, _ := a.model.state.Snapshot(h.Name)
		var d decision.Decision
		took("decide"+when, func() { d = a.resolve.Decide(s) })
		took("enforce"+when, func() { a.enforce(s.Service, d) })
		write(when)
	}
	took("enforce-gone", func() { a.retire(h.Name) })
	write("-gone")
	took("prune", func() { a.writer.PruneAddrs(nil, time.Now()) })
	write("-prune")
}

// A hundred Services that are just not heavy change at once. A round decides about no more of them than of one that
// is heavy, and about the others beside the loop.
func TestManyServicesHoldUpNoOther(t *testing.T) {
	const many = 100
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(1 << 20).Tables})
	lab.Must(t, err)
	var size atomic.Int64
	a := newAgent(Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}, parts{
		queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), writer: writer,
		resolve: func(s lb.Snapshot, m *lb.Memory) lb.Resolution {
			size.Add(int64(s.Size()))

			return s.ResolveIn(m)
		},
	})
	a.synced, a.complete, a.heavy = true, true, &decision.Heavy{}
	for n := range many {
		h := heavy.New(1, 0, decision.HeavySize/2-100, 2)
		h.Name.Name = fmt.Sprint("large-", n)
		a.model.state.SetService(h.Service)
	}
	a.program()
	if decided := size.Load(); decided == 0 || decided > 4*decision.HeavySize {
		t.Errorf("Services of the size %d are decided in a round, want some and no more than %d", decided, 4*decision.HeavySize)
	}
	waiting := 0
	for s := range a.model.state.Snapshots() {
		if a.heavy.Has(s.Service.Name) {
			waiting++
		}
	}
	if waiting < many-4 {
		t.Errorf("%d Services wait for their decision, want most of %d", waiting, many)
	}
}
