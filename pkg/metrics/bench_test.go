package metrics

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// A scrape of 10,000 Services with series of their own, with 100,000 backends,
// after everything has changed: maps are read in memory here, see
// BenchmarkKernelMaps for those of the kernel.
func BenchmarkScrape(b *testing.B) {
	w := newWorld()
	w.crowd(10_000)
	services := w.services(b, 10_000)
	registry, err := NewRegistry(NewSync(func() time.Time { return w.now }))
	lab.Must(b, err)
	handler := promhttp.HandlerFor(Gatherers{registry, services}, promhttp.HandlerOpts{})
	w.benchmark(b, func(b *testing.B) {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		b.ReportMetric(float64(answer.Body.Len())/1e6, "MB")
	})
}

// The same with the maps of a kernel.
func BenchmarkKernelMaps(b *testing.B) {
	w := newWorld()
	w.crowd(10_000)
	pinned := mapstest.MustCreate(b, nil)
	services, err := NewServices(ServicesConfig{
		Tables: maps.Tables{ServicePorts: pinned.ServicePorts, Backends: pinned.Backends, Loads: pinned.Loads},
		Stats:  pinned.Stats,
		Limit:  10_000,
		Moved:  func() uint64 { return w.moved },
		Now:    func() time.Time { return w.now },
	})
	lab.Must(b, err)
	for id, port := range w.ServicePorts.Entries {
		lab.Must(b, pinned.Stats.Begin(id), pinned.ServicePorts.Put(id, port))
		mustCount(b, pinned, id, maps.PortCounts{Connections: 7, BytesSent: 100, BytesReceived: 1000})
		lab.Must(b, refusals(pinned).Put(maps.RefusalKey{ServicePortId: id, Reason: noBackend}, uint64(1)))
	}
	for i, backend := range w.Backends.All() {
		lab.Must(b, pinned.Backends.Put(i, backend))
	}
	w.moved++
	w.benchmark(b, func(b *testing.B) {
		families, err := services.Gather()
		lab.Must(b, err)
		if n := len(families[0].GetMetric()); n != 10_000 {
			b.Fatalf("%d Services", n)
		}
	})
}

// benchmark reads again and again, after nothing has changed, or all.
func (w *world) benchmark(b *testing.B, read func(*testing.B)) {
	for _, bench := range []struct {
		name    string
		between func()
	}{
		{"nothing changed", func() { w.later() }},
		{"all changed", func() { w.later(); w.moved++ }},
	} {
		b.Run(bench.name, func(b *testing.B) {
			defer reportCPU(b)()
			for b.Loop() {
				bench.between()
				read(b)
			}
		})
	}
}

// reportCPU reports what a benchmark has used, garbage collection included: on a
// machine that others use, that shows more than the time it took.
func reportCPU(b *testing.B) func() {
	begin := cpuTime(b)

	return func() { b.ReportMetric(float64((cpuTime(b)-begin).Microseconds())/1e3/float64(b.N), "cpu-ms/op") }
}

func cpuTime(b *testing.B) time.Duration {
	var usage unix.Rusage
	lab.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &usage))

	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
