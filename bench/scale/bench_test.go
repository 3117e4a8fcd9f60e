// Package scale measures an agent, the real binary, in a cluster of 10,000
// Services with 10 endpoints each. It is no benchmark of traffic.
package scale

import (
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	os.Exit(m.Run())
}

// How long an agent takes that starts on a node for the first time, from the
// start of its process until everything is programmed, and what that costs.
func BenchmarkStart(b *testing.B) {
	cluster := mustEncodeCluster(b)
	var n *node
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		if n != nil {
			must(b, n.Close())
		}
		n = mustNode(b, cluster)
		b.StartTimer()
		n.mustStart(b)
		cpu += n.mustReadCPU(b)
	}
	b.StopTimer()
	n.report(b, cpu)
}

// How long an agent takes that finds all in the maps that it would write.
func BenchmarkRestart(b *testing.B) {
	n := mustNode(b, mustEncodeCluster(b))
	n.mustStart(b)
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		must(b, n.Kill())
		b.StartTimer()
		n.mustStart(b)
		cpu += n.mustReadCPU(b)
	}
	b.StopTimer()
	n.report(b, cpu)
}

// report tells what the starts took, what the agent has written, and what
// memory it has at its peak and after a while; and what the maps have.
func (n *node) report(b *testing.B, cpu time.Duration) {
	b.Helper()
	const mega = 1e6
	b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
	b.ReportMetric(n.mustReadMemory(b, "VmHWM")/mega, "peak-MB")
	mustHold(b, n.mustMaps(b))
	calls, _ := n.mustCountWrites(b)
	b.ReportMetric(float64(calls), "writes")
	time.Sleep(5 * time.Second)
	b.ReportMetric(n.mustReadMemory(b, "VmRSS")/mega, "rss-MB")
	b.ReportMetric(n.mustReadMemory(b, "RssAnon")/mega, "anon-MB")
	b.ReportMetric(n.mustReadMapMemory(b)/mega, "maps-MB")
}

// How long it takes from the moment at which the API server tells of a pod
// that replaces another one until clients get the new one, and how many writes
// that costs. The old one's retirement is among the writes.
func BenchmarkChange(b *testing.B) {
	n := mustNode(b, mustEncodeCluster(b))
	n.mustStart(b)
	pinned := n.mustMaps(b)
	calls, slots := n.mustCountWrites(b)
	var latencies []time.Duration
	for b.Loop() {
		b.StopTimer()
		generation := len(latencies) + 1
		i := 1 + generation%serviceCount
		event := mustEncodeSlice(b, sliceOf(i, generation))
		before, _, err := pinned.Frontends.Lookup(frontendOf(i))
		must(b, err)
		time.Sleep(5 * time.Millisecond) // until all is quiet
		b.StartTimer()

		start := time.Now()
		n.api.mustSend(b, "endpointslices", event)
		for now := before; now == before; {
			leave()
			now, _, err = pinned.Frontends.Lookup(frontendOf(i))
			must(b, err)
		}
		latencies = append(latencies, time.Since(start))
	}
	b.StopTimer()
	time.Sleep(time.Second) // the grace of the last

	slices.Sort(latencies)
	count := float64(len(latencies))
	b.ReportMetric(float64(latencies[len(latencies)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(latencies[len(latencies)*99/100].Microseconds()), "p99-µs")
	callsAfter, slotsAfter := n.mustCountWrites(b)
	b.ReportMetric(float64(callsAfter-calls)/count, "writes/op")
	b.ReportMetric(float64(slotsAfter-slots)/count, "slots/op")
}

// leave leaves the processor to the agent for some 60 µs. Go's own sleep would
// take a millisecond.
func leave() {
	_ = unix.Nanosleep(&unix.Timespec{Nsec: 10_000}, nil) // one that is cut short is as good
}
