package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Counters are scraped without pause while agents are stopped and killed under load, a build with another layout of the
// maps comes and goes, and so do Services. While an agent runs, none falls, and none leaps; those that agents hand on never
// fall. Over all restarts, Prometheus computes no more connections and bytes than there were, of sockets and of flows at devices, some of
// which agents end.
//
//	a client in a pod, one on node-1 ───────── web:80 ─────┬─ pod-1-0, pod-2-0
//	a client outside ───────────────── node port of node-1 ┘
//	                                           brief:80 ──── pod-1-0, comes and goes
//
// A restart takes seconds on a busy machine: CI has time for those that fit into 25 s, and for six in any case.
// TestCountersOfManyAgents of pkg/datapath always plays fifty agents, which are no processes. The flag -restarts 50 plays that many here.
func TestCountersOnlyGrow(t *testing.T) {
	const most, atMost = 50, 25 * time.Second // restarts
	atLeast := *restarts
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent, "--backend-metrics=100")
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	s.SetEndpoints(t, "brief", scene.ReadyAll(s.Local()[0])...)
	svc := s.CreateService(t, "web", scene.NodePort, samePorts(30080))
	web, web6 := scene.At(svc.Spec.ClusterIPs[0], 80), scene.At(svc.Spec.ClusterIPs[1], 80)
	port, port6 := scene.At(s.Lab.Nodes[0].IPv4.String(), 30080), scene.At(s.Lab.Nodes[0].IPv6.String(), 30080)
	dials := []scene.Dial{
		s.Pod.To("tcp", web), s.Node.To("tcp", web), s.Pod.To("tcp", web6), s.Pod.To("udp", web), s.Node.To("udp", web6),
		s.Outside.To("tcp", port), s.Outside.To("tcp", port6), s.Outside.To("udp", port), s.Outside.To("udp", port6),
	}
	for _, d := range dials {
		scene.MustReach(t, d, scene.Names(s.Local()[0], s.Remote()[0])...)
	}
	newer, err := sluice.BuildOtherLayout(t.TempDir())
	lab.Must(t, err)
	builds := []string{newer, s.Agent.Binary()}

	const rate = 10 // of each: the table of flows has room for two minutes of them
	load := scene.MustDial(t, rate, dials...)
	began := time.Now()
	counters := make(growth)
	scraped := make(chan int)
	stop := make(chan struct{})
	go func() {
		n := 0
		defer func() { scraped <- n }()
		for {
			select {
			case <-stop:
				return
			default:
			}
			if p, err := in(s.Lab.Nodes[0].Namespace)(metricsAddress, "/metrics"); err == nil && p.code == 200 && strings.HasSuffix(p.body, "\n") {
				n++
				for _, problem := range counters.add(p.body) {
					t.Errorf("scrape %d: %s", n, problem)
				}
			} // else there is no agent at the moment, or it was killed in the middle of a line
		}
	}()
	restarts := 0
	for ; !t.Failed() && (restarts < atLeast || restarts < most && time.Since(began) < atMost); restarts++ {
		end := s.Agent.Stop
		if restarts%2 == 1 {
			end = s.Agent.Kill
		}
		lab.Must(t, end())
		s.Agent.SetBinary(builds[restarts/2%2])
		lab.Must(t, s.Agent.Start())
		sluice.MustWait(t, s.Agent)
		switch restarts % 4 {
		case 0:
			s.CreateService(t, "brief")
		case 2:
			s.DeleteService(t, "brief")
		}
		time.Sleep(rand.N(300 * time.Millisecond))
	}
	time.Sleep(6 * time.Second) // counts of the last agent are shown, see countsAge
	close(stop)
	n := <-scraped
	dialled := rate * float64(len(dials)) * time.Since(began).Seconds()
	load.MustHaveWorked(t)
	of := func(name string) float64 {
		return counters.increase(fmt.Sprintf("sluice_service_%s_total{namespace=%q,service=%q}", name, s.Namespace, "web"))
	}
	shown, sent, received := of("connections"), of("sent_bytes"), of("received_bytes")
	ended := counters.increase(`sluice_flows_ended_total{why="idle"}`)
	t.Logf("%d restarts, %d scrapes: %v of some %v connections, %v bytes sent and %v received, %v flows ended", restarts, n, shown, dialled, sent, received, ended)
	if restarts < atLeast || n < restarts {
		t.Errorf("%d scrapes of %d restarts, want one of each at least", n, restarts)
	}
	if shown > dialled || shown == 0 || ended > dialled || ended == 0 {
		t.Errorf("Prometheus has %v connections and %v flows that agents have ended, and %v were dialled", shown, ended, dialled)
	}
	const longest = 1000 // bytes of an exchange in a direction
	for _, bytes := range []float64{sent, received} {
		if bytes > longest*dialled || bytes < shown {
			t.Errorf("Prometheus has %v bytes of %v connections, and %v were dialled", bytes, shown, dialled)
		}
	}
}

// growth is what Prometheus computes of counters: by name and labels.
type growth map[string]*counter

type counter struct {
	process        string // whose scrape it was
	last, increase float64
}

// leap is more than any counter of this test grows between two scrapes.
const leap = 1e12

// kept are the counters that agents hand on: they count since the maps were created.
var kept = []string{"sluice_decisions_total", "sluice_flow_repairs_total", "sluice_masquerade_retries_total", "sluice_stack_ports_total"}

// add adds a scrape, and returns what is wrong about it.
func (g growth) add(body string) (problems []string) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(body))
	if err != nil {
		return []string{err.Error()}
	}
	process := fmt.Sprint(families["process_start_time_seconds"].GetMetric())
	for name, family := range families {
		if !strings.HasPrefix(name, "sluice_") && !strings.HasPrefix(name, "kubeproxy_") {
			continue
		}
		for _, metric := range family.GetMetric() {
			var labels []string
			for _, label := range metric.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", label.GetName(), label.GetValue()))
			}
			series := name + "{" + strings.Join(labels, ",") + "}"
			values := make(map[string]float64)
			switch family.GetType() {
			case dto.MetricType_COUNTER:
				values[series] = metric.GetCounter().GetValue()
			case dto.MetricType_HISTOGRAM:
				values[series+" count"] = float64(metric.GetHistogram().GetSampleCount())
				values[series+" sum"] = metric.GetHistogram().GetSampleSum()
				for _, bucket := range metric.GetHistogram().GetBucket() {
					values[fmt.Sprintf("%s up to %v", series, bucket.GetUpperBound())] = float64(bucket.GetCumulativeCount())
				}
			}
			for series, value := range values {
				problems = append(problems, g.addValue(series, value, process, slices.Contains(kept, name))...)
			}
		}
	}

	return problems
}

// addValue adds a value of a series, which agents keep or begin anew.
func (g growth) addValue(series string, value float64, process string, isKept bool) (problems []string) {
	was := g[series]
	if was == nil {
		was = &counter{process: process, last: value}
		g[series] = was
	}
	more := value - was.last
	switch {
	case more < 0 && (was.process == process || isKept) && !comesAndGoes(series):
		problems = append(problems, fmt.Sprintf("%s falls from %v to %v", series, was.last, value))
	case more < 0: // a reset, for Prometheus
		more = value
	}
	if more > leap || value > leap {
		problems = append(problems, fmt.Sprintf("%s leaps from %v to %v", series, was.last, value))
	}
	*was = counter{process: process, last: value, increase: was.increase + more}

	return problems
}

// comesAndGoes reports whether a series is that of a Service which this test deletes, and of one that
// begins anew when it creates it again.
func comesAndGoes(name string) bool { return strings.Contains(name, `service="brief"`) }

func (g growth) increase(name string) float64 {
	if c := g[name]; c != nil {
		return c.increase
	}

	return 0
}
