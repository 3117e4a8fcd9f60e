package e2e

import (
	"fmt"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// Counters are scraped without pause while agents are stopped and killed under load, a newer build comes,
// and Services come and go. While an agent runs, none falls, and none leaps. Over all restarts, Prometheus
// computes no more connections than were dialled.
//
//	one client in a pod, one on node-1 ── web:80 ── pod-1-0, pod-2-0
//	                                      brief:80 ── pod-1-0, comes and goes
func TestCountersOnlyGrow(t *testing.T) {
	const most, atLeast, atMost = 50, 6, 25 * time.Second // restarts
	s := mustTestbed(t)
	sluice.MustRestart(t, s.Agent, "--backend-metrics=100")
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	s.SetEndpoints(t, "brief", scene.ReadyAll(s.Local()[0])...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", web), scene.Names(s.Local()[0], s.Remote()[0])...)
	newer, err := sluice.Build(t.TempDir(), "newer")
	lab.Must(t, err)
	builds := []string{newer, s.Agent.Binary()}

	load := scene.MustDial(t, 100, s.Pod.To("tcp", web), s.Node.To("tcp", web))
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
			if p, err := in(s.Lab.Nodes[0].Namespace)(metricsAddress, "/metrics"); err == nil && p.code == 200 {
				n++
				for _, problem := range counters.add(p.body) {
					t.Errorf("scrape %d: %s", n, problem)
				}
			} // else there is no agent at the moment
		}
	}()
	restarts := 0
	for ; restarts < most && !t.Failed() && (restarts < atLeast || time.Since(began) < atMost); restarts++ {
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
	dialled := 100 * 2 * time.Since(began).Seconds()
	load.MustHaveWorked(t)
	shown := counters.increase(fmt.Sprintf(`sluice_service_connections_total{namespace="%s",service="web"}`, s.Namespace))
	t.Logf("%d restarts, %d scrapes: %v of some %v connections", restarts, n, shown, dialled)
	if restarts < atLeast || n < restarts {
		t.Errorf("%d scrapes of %d restarts, want one of each at least", n, restarts)
	}
	if shown > dialled {
		t.Errorf("Prometheus has %v connections, and %v were dialled", shown, dialled)
	}
}

// growth is what Prometheus computes of counters: by name and labels.
type growth map[string]*counter

type counter struct {
	process        string // whose scrape it was
	last, increase float64
}

var (
	counterType = regexp.MustCompile(`(?m)^# TYPE ([a-z_]+) counter$`)
	startTime   = regexp.MustCompile(`(?m)^process_start_time_seconds (.*)$`)
)

// leap is more than any counter of this test grows between two scrapes.
const leap = 1e12

// add adds a scrape, and returns what is wrong about it.
func (g growth) add(body string) (problems []string) {
	process := fmt.Sprint(startTime.FindStringSubmatch(body))
	kinds := make(map[string]bool)
	for _, match := range counterType.FindAllStringSubmatch(body, -1) {
		kinds[match[1]] = true
	}
	for _, match := range sample.FindAllStringSubmatch(body, -1) {
		name, _, _ := strings.Cut(match[1], "{")
		histogram := strings.HasSuffix(name, "_count") || strings.HasSuffix(name, "_bucket")
		if !kinds[name] && !histogram || !strings.HasPrefix(name, "sluice_") && !strings.HasPrefix(name, "kubeproxy_") {
			continue
		}
		value, err := strconv.ParseFloat(match[2], 64)
		if err != nil {
			return append(problems, fmt.Sprintf("%s: %v", match[1], err))
		}
		was := g[match[1]]
		if was == nil {
			was = &counter{process: process, last: value}
			g[match[1]] = was
		}
		more := value - was.last
		switch {
		case more < 0 && was.process == process && !comesAndGoes(match[1]):
			problems = append(problems, fmt.Sprintf("%s falls from %v to %v", match[1], was.last, value))
		case more < 0: // a reset, for Prometheus
			more = value
		}
		if more > leap || value > leap {
			problems = append(problems, fmt.Sprintf("%s leaps from %v to %v", match[1], was.last, value))
		}
		*was = counter{process: process, last: value, increase: was.increase + more}
	}

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
