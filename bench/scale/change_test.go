package scale

import (
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// How long it takes from the moment at which the API server sends the event of a pod
// that replaces another one until clients get the new one, and how many writes
// that costs: while nothing else changes, and under churn. The old one's
// retirement is among the writes.
func BenchmarkChange(b *testing.B) {
	n := mustNode(b, mustEncodeCluster(b))
	n.mustStart(b)
	c := &changes{node: n, pinned: n.mustMaps(b)}
	b.Run("quiet", c.mustMeasure)
	b.Run("churn", func(b *testing.B) {
		defer c.churn(b)()
		c.mustMeasure(b)
	})
}

// churnPace is how often something else changes under churn.
const churnPace = 10 * time.Millisecond

// changes are made one by one, each to the next Service.
type changes struct {
	node   *node
	pinned *maps.Pinned

	mu   sync.Mutex
	made int // so far
}

// next returns the event of the next change, and which Service it is of.
func (c *changes) next(b *testing.B) (event []byte, i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made++
	i = 1 + c.made%serviceCount

	return mustEncode(b, discoveryv1.SchemeGroupVersion, watch.Event{Type: watch.Modified, Object: sliceOf(i, c.made)}), i
}

// mustMeasure measures b.N changes.
func (c *changes) mustMeasure(b *testing.B) {
	calls, stores := c.node.mustCountWrites(b)
	var latencies []time.Duration
	for b.Loop() {
		b.StopTimer()
		event, i := c.next(b)
		id, _, err := c.pinned.FrontendIDs.Lookup(maps.FrontendKeyOf(clusterIP(i), 80, unix.IPPROTO_TCP, maps.ScopeInternal))
		lab.Must(b, err)
		before := c.pinned.Frontends.Get(id)
		time.Sleep(5 * time.Millisecond) // until all is quiet
		b.StartTimer()

		start := time.Now()
		c.node.api.mustSend(b, "endpointslices", event)
		for now := before; now == before; {
			leave()
			now = c.pinned.Frontends.Get(id)
		}
		latencies = append(latencies, time.Since(start))
	}
	b.StopTimer()
	time.Sleep(time.Second) // until the last one is retired

	slices.Sort(latencies)
	count := float64(len(latencies))
	b.ReportMetric(float64(latencies[len(latencies)/2].Microseconds()), "p50-µs")
	p99 := float64(latencies[len(latencies)*99/100].Microseconds())
	b.ReportMetric(p99, "p99-µs")
	compareWithGoal(b, p99, "p99-µs")
	callsAfter, storesAfter := c.node.mustCountWrites(b)
	b.ReportMetric(float64(callsAfter-calls)/count, "writes/op")
	b.ReportMetric(float64(storesAfter-stores)/count, "stores/op")
}

// churn changes other Services until what it returns is called.
func (c *changes) churn(b *testing.B) (stop func()) {
	pace, done := time.NewTicker(churnPace), make(chan struct{})
	var churning sync.WaitGroup
	churning.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-pace.C:
				event, _ := c.next(b)
				c.node.api.mustSend(b, "endpointslices", event)
			}
		}
	})

	return func() {
		pace.Stop()
		close(done)
		churning.Wait()
	}
}

// How long the agent runs on a processor for changes of endpoints: they come one
// by one, a hundred a second or as fast as they can be sent. What it does of its
// own accord in the same time is subtracted.
func BenchmarkUpdates(b *testing.B) {
	n := mustNode(b, mustEncodeCluster(b))
	n.mustStart(b)
	time.Sleep(5 * time.Second) // what follows a start
	c := &changes{node: n}
	b.Run("paced", func(b *testing.B) { c.mustMeasureCPU(b, churnPace) })
	b.Run("burst", func(b *testing.B) { c.mustMeasureCPU(b, 0) })
}

// idleTime is longer than the agent delays the work that follows a change.
const idleTime = 2 * time.Second

// mustMeasureCPU sends b.N changes.
func (c *changes) mustMeasureCPU(b *testing.B, pace time.Duration) {
	var events [][]byte
	for range b.N {
		event, _ := c.next(b)
		events = append(events, event)
	}
	before := c.node.mustReadClock(b)
	time.Sleep(idleTime)
	idle := (c.node.mustReadClock(b) - before).Seconds() / idleTime.Seconds()

	begin, before := time.Now(), c.node.mustReadClock(b)
	for i, event := range events {
		time.Sleep(time.Until(begin.Add(time.Duration(i) * pace)))
		c.node.api.mustSend(b, "endpointslices", event)
	}
	time.Sleep(idleTime)
	cpu := (c.node.mustReadClock(b) - before).Seconds() - idle*time.Since(begin).Seconds()
	b.ReportMetric(cpu*1e6/float64(b.N), "cpu-µs/op")
	process, _ := c.node.mustReadProcess(b)
	b.ReportMetric(float64(process.VmRSS)/1e6, "rss-MB")
}

// leave leaves the processor to the agent for some 60 µs. Go's own sleep would
// take a millisecond.
func leave() {
	_ = unix.Nanosleep(&unix.Timespec{Nsec: 10_000}, nil) // one that is cut short is as good
}
