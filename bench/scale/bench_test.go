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
	var cpu, attached time.Duration
	for b.Loop() {
		b.StopTimer()
		if n != nil {
			lab.Must(b, n.Close())
		}
		n = mustNode(b, cluster)
		begin := time.Now()
		b.StartTimer()
		n.mustStart(b)
		_, took := n.mustReadProcess(b)
		cpu += took
		b.StopTimer()
		attached += n.mustBeAttached(b).Sub(begin)
		b.StartTimer()
	}
	b.StopTimer()
	hooks := attached.Seconds() / float64(b.N)
	b.ReportMetric(hooks, "hooks-s")
	compareWithGoal(b, hooks, "hooks-s")
	n.report(b, cpu)
}

// How long an agent takes that finds all in the maps that it would write.
func BenchmarkRestart(b *testing.B) {
	n := mustNode(b, mustEncodeCluster(b))
	n.mustStart(b)
	var cpu time.Duration
	for b.Loop() {
		b.StopTimer()
		lab.Must(b, n.Kill())
		b.StartTimer()
		n.mustStart(b)
		_, took := n.mustReadProcess(b)
		cpu += took
	}
	b.StopTimer()
	n.report(b, cpu)
}

// report reports the time of the starts, the agent's writes, its memory at the peak
// and after a while, and that of the maps.
func (n *node) report(b *testing.B, cpu time.Duration) {
	b.Helper()
	const mega = 1e6
	compareWithGoal(b, b.Elapsed().Seconds()/float64(b.N), "s")
	b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
	process, _ := n.mustReadProcess(b)
	peak := float64(process.VmHWM) / mega
	b.ReportMetric(peak, "peak-MB")
	compareWithGoal(b, peak, "peak-MB")
	mustHold(b, n.mustMaps(b))
	calls, _ := n.mustCountWrites(b)
	b.ReportMetric(float64(calls), "writes")
	time.Sleep(5 * time.Second)
	process, _ = n.mustReadProcess(b)
	b.ReportMetric(float64(process.VmRSS)/mega, "rss-MB")
	b.ReportMetric(float64(process.RssAnon)/mega, "anon-MB")
	b.ReportMetric(n.mustReadMapMemory(b)/mega, "maps-MB")
}

// goals are the most that values should be, in clusters of a size; of size zero: in all. The bench
// beside kube-proxy has more, with a real API server.
var goals = []struct {
	benchmark           string
	services, endpoints int
	unit                string
	most                float64
}{
	{"BenchmarkStart", 10, 2, "hooks-s", 0.4},
	{"BenchmarkStart", 10_000, 2, "s", 1},
	{"BenchmarkStart", 100_000, 10, "s", 8},
	{"BenchmarkStart", 100_000, 10, "peak-MB", 350},
	{"BenchmarkRestart", 10, 2, "s", 0.15},
	{"BenchmarkChange/quiet", 0, 0, "p99-µs", 1000},
	{"BenchmarkChange/churn", 0, 0, "p99-µs", 3000},
}

// compareWithGoal logs whether a value of a benchmark reaches its goal, if it has one.
func compareWithGoal(b *testing.B, value float64, unit string) {
	b.Helper()
	for _, g := range goals {
		ofSize := g.services == 0 || g.services == serviceCount && g.endpoints == endpointCount
		if g.benchmark != b.Name() || g.unit != unit || !ofSize {
			continue
		}
		outcome := "reached"
		if value > g.most {
			outcome = "short of it"
		}
		b.Logf("goal: at most %v %s; it is %.2f: %s", g.most, unit, value, outcome)
	}
}
