// Package scale measures an agent, the real binary, in a cluster of 10,000
// Services with 10 endpoints each, or as many as its flags demand. It is no
// benchmark of traffic.
package scale

import (
	"flag"
	"os"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	flag.IntVar(&serviceCount, "services", serviceCount, "how many Services there are")
	flag.IntVar(&endpointCount, "endpoints", endpointCount, "how many endpoints each of them has")
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

// report reports the time of the starts, the agent's writes, its memory at the peak
// and after a while, and that of the maps.
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
