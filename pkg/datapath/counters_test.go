package datapath

import (
	"fmt"
	stdmaps "maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/test/lab"
)

// Agents come and go while programs count what clients dial: each opens the maps and begins to show the counts of Services, as a
// restart or an upgrade does, and is scraped from its first moment on without pause. While it shows them, no counter falls,
// or shows more than the clients have done since it began; and over all agents Prometheus computes no more connections than were
// begun. What counts since the maps were created falls never, also where an agent takes over maps of another layout. [github.com/sluice-lb/sluice/test/e2e.TestCountersOnlyGrow] has processes for agents.
func TestCountersOfManyAgents(t *testing.T) {
	const agents, rate = 50, 200
	w := newWorld(t)
	client := w.pod(t)
	var loads []*lab.RunningLoad
	for i, s := range []service{
		{proto: "tcp", at: []string{"10.96.2.1:80"}, to: w.all4()},
		{proto: "udp", at: []string{"10.96.2.2:80"}, to: w.all4()},
		{proto: "tcp", at: []string{"[fd00:96::2:3]:80"}, to: w.all6()},
		{proto: "tcp", at: []string{"10.96.2.4:80"}}, // refused
	} {
		w.add(t, s)
		network := s.proto + map[bool]string{false: "4", true: "6"}[strings.Contains(s.at[0], "[")]
		load, err := client.StartLoad(lab.Load{Exchange: lab.Exchange{Network: network, Address: s.at[0], Timeout: time.Second}, Rate: rate})
		lab.Must(t, err)
		if i < 3 {
			loads = append(loads, load)
		} else {
			defer func() { _, _ = load.Stop() }() // each of its exchanges fails
		}
	}
	// What one Service counts at most in the life of an agent.
	const most = 1e6
	shown, scrapes := 0.0, 0
	kept := make(map[maps.Reason]uint64)
	for agent := range agents {
		last := w.mustShowCounts(t, agent, most, &scrapes, kept)
		for name, value := range last {
			if strings.HasPrefix(name, "sluice_service_connections_total") {
				shown += value
			}
		}
	}
	begun := 0
	for _, load := range loads {
		report, err := load.Stop()
		lab.Must(t, err)
		begun += report.Started
	}
	t.Logf("%d agents, %d scrapes: %v of %d connections", agents, scrapes, shown, begun)
	if shown > float64(begun) || shown < float64(begun)/4 {
		t.Errorf("all agents have shown %v connections, and %d were begun", shown, begun)
	}
}

// mustShowCounts is an agent that shows counts for a moment, in which a Service comes and another one goes. Each third one
// makes the maps of Services anew, and larger. It returns what the last scrape had of the counters, and sets what is kept
// for the next agents.
func (w *world) mustShowCounts(t *testing.T, agent int, most float64, scrapes *int, kept map[maps.Reason]uint64) map[string]float64 {
	t.Helper()
	pinned, err := maps.Create(w.cfg.BPFRoot, maps.Options{
		Capacities: w.cfg.Capacities, Least: map[string]uint32{maps.NameFrontendIDs: 4096 + 64*uint32(agent/3)},
	})
	lab.Must(t, err)
	defer func() { lab.Must(t, pinned.Close()) }()
	moved, began := uint64(0), time.Now()
	s, err := metrics.NewServices(metrics.ServicesConfig{
		Tables: pinned.Tables, Stats: pinned.Stats, Limit: 100,
		Moved: func() uint64 { return moved },
		// Counts are read again every few milliseconds.
		Now: func() time.Time { return began.Add(1000 * time.Since(began)) },
	})
	lab.Must(t, err)
	last := make(map[string]float64)
	scrape := func() {
		*scrapes++
		families, err := s.Gather()
		lab.Must(t, err)
		for name, value := range countersOf(families) {
			if value < last[name] || value > most {
				t.Fatalf("agent %d, after %v: %s is %v, and was %v", agent, time.Since(began), name, value, last[name])
			}
			last[name] = value
		}
		decisions, err := pinned.ReasonCounts()
		lab.Must(t, err)
		for reason, n := range kept {
			if decisions[reason] < n {
				t.Fatalf("agent %d, after %v: %v decisions are counted of %v, and were %v", agent, time.Since(began), decisions[reason], reason, n)
			}
		}
		stdmaps.Copy(kept, decisions)
	}
	scrape()
	id := maps.ID(500, uint32(agent+1))
	lab.Must(t, pinned.Stats.Begin(id), pinned.ServicePorts.Put(id, maps.ServicePortOf("test", fmt.Sprintf("brief-%d", agent), "", 0, 0)))
	moved++
	for end := time.Now().Add(time.Duration(20+rand.IntN(60)) * time.Millisecond); time.Now().Before(end); {
		scrape()
	}
	lab.Must(t, pinned.ServicePorts.Delete(id), pinned.Stats.End(id))
	moved++
	scrape()

	return last
}

// countersOf returns the values of counters and histograms, by name and labels.
func countersOf(families []*dto.MetricFamily) map[string]float64 {
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := fmt.Sprint(f.GetName(), m.GetLabel())
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				values[name] = m.GetCounter().GetValue()
			case dto.MetricType_HISTOGRAM:
				values[name] = float64(m.GetHistogram().GetSampleCount())
			}
		}
	}

	return values
}
