package datapath

import (
	"fmt"
	stdmaps "maps"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/test/lab"
)

// Agents come and go while programs count what clients dial: each opens the maps and begins to show the counts of Services, as a
// restart or an upgrade does, and is scraped from its first moment on without pause. While it shows them, no counter falls,
// or shows more than the clients have done since it began; and over all agents Prometheus computes no more connections than were
// begun, and no more bytes than were sent. What counts since the maps were created falls never, also where an agent takes over maps of another layout.
//
// The clients are a pod, whose sockets are translated, and another program in it that no socket hook sees, whose packets are
// translated at its device, in both families. Each agent also ends flows at devices that are idle: most bytes of short UDP flows, of which
// programs count the first packet and then once a second, only it knows.
//
// [github.com/sluice-lb/sluice/test/e2e.TestCountersOnlyGrow] has processes for agents. They take seconds to start, so it
// plays fewer restarts in CI; the fifty are played here.
func TestCountersOfManyAgents(t *testing.T) {
	const agents, rate = 50, 200
	w := newWorldBy(t, lab.Routed)
	w.mustAttachPods(t)
	client, unseen := w.pod(t), lab.MustCaller(t, w.client.Namespace, nil)
	var loads []*countedLoad
	for _, by := range []struct {
		service
		client *lab.Caller
	}{
		{service{proto: "tcp", at: []string{"10.96.2.1:80"}, to: w.all4()}, client},
		{service{proto: "udp", at: []string{"10.96.2.2:80"}, to: w.all4()}, client},
		{service{proto: "tcp", at: []string{"[fd00:96::2:3]:80"}, to: w.all6()}, client},
		{service{proto: "udp", at: []string{"[fd00:96::2:4]:80"}, to: w.all6()}, client},
		{service{proto: "tcp", at: []string{"10.96.2.5:80"}}, client}, // refused
		{service{proto: "tcp", at: []string{"10.96.2.6:80"}, to: w.all4()}, unseen},
		{service{proto: "udp", at: []string{"10.96.2.7:80"}, to: w.all4()}, unseen},
		{service{proto: "tcp", at: []string{"[fd00:96::2:8]:80"}, to: w.all6()}, unseen},
		{service{proto: "udp", at: []string{"[fd00:96::2:9]:80"}, to: w.all6()}, unseen},
	} {
		l := &countedLoad{service: w.add(t, by.service), client: by.client, atDevices: by.client == unseen}
		loads = append(loads, l)
		if !l.inBursts() {
			l.start(t, lab.Load{Rate: rate})
		}
	}
	// What one Service counts at most in the life of an agent.
	const most = 1e6
	scrapes := 0
	shown := make(map[string]float64) // by all agents
	kept := make(map[maps.Reason]uint64)
	for agent := range agents {
		for name, value := range w.mustShowCounts(t, agent, most, &scrapes, kept, loads) {
			shown[name] += value
		}
	}
	t.Logf("%d agents, %d scrapes", agents, scrapes)
	for _, l := range loads {
		if !l.inBursts() {
			l.stop(t)
		}
		if len(l.to) > 0 {
			l.check(t, shown)
		}
	}
}

// countedLoad is what a client does with a Service.
type countedLoad struct {
	*service
	client    *lab.Caller
	atDevices bool // and not at sockets
	running   *lab.RunningLoad

	exchanges, connections int // that were begun
}

// inBursts reports whether the clients of each agent open some flows of their own, of many datagrams each.
func (l *countedLoad) inBursts() bool { return l.atDevices && l.proto == "udp" }

func (l *countedLoad) isIPv4() bool { return netip.MustParseAddrPort(l.at[0]).Addr().Is4() }

func (l *countedLoad) start(t *testing.T, load lab.Load) {
	t.Helper()
	load.Exchange = lab.Exchange{Network: l.proto + map[bool]string{true: "4", false: "6"}[l.isIPv4()], Address: l.at[0], Timeout: time.Second}
	l.connections += load.Keep
	var err error
	l.running, err = l.client.StartLoad(load)
	lab.Must(t, err)
}

func (l *countedLoad) stop(t *testing.T) {
	t.Helper()
	report, err := l.running.Stop()
	lab.Must(t, err)
	l.exchanges += report.Started
	if l.inBursts() {
		l.connections += len(report.Failures) // each is opened again
	} else {
		l.connections += report.Started
	}
}

// check compares what agents have shown with what was done.
func (l *countedLoad) check(t *testing.T, shown map[string]float64) {
	t.Helper()
	of := func(counter string) float64 {
		return shown[fmt.Sprintf("sluice_service_%s_total test service-%d", counter, l.id)]
	}
	connections, sent, received := of("connections"), of("sent_bytes"), of("received_bytes")
	t.Logf("%s %s: %v of %d connections, %v and %v bytes of %d exchanges", l.proto, l.at[0], connections, l.connections, sent, received, l.exchanges)
	if begun := float64(l.connections); connections > begun || connections < begun/4 {
		t.Errorf("%s %s: all agents have shown %v connections, and %v were begun", l.proto, l.at[0], connections, begun)
	}
	// What one exchange brings in a direction, in bytes.
	least, most := 1.0, 1000.0
	switch {
	case l.proto == "udp" && !l.atDevices:
		least, most = 0, 0 // sockets do not count them
	case l.proto == "udp": // a request is one packet
		least = float64(len("who\n") + 8 + map[bool]int{true: 20, false: 40}[l.isIPv4()])
		if all := least * float64(l.exchanges); sent > all {
			t.Errorf("%s %s: all agents have shown %v bytes from clients, and %v were sent", l.proto, l.at[0], sent, all)
		}
	}
	for _, bytes := range []float64{sent, received} {
		if n := float64(l.exchanges); bytes > most*n || bytes < least*n/4 {
			t.Errorf("%s %s: all agents have shown %v and %v bytes of %v exchanges", l.proto, l.at[0], sent, received, n)
		}
	}
}

// mustShowCounts is an agent that shows counts for a moment, in which a Service comes and another one goes. Each third one
// makes the maps of Services anew, and larger. It returns what the last scrape had of the counters, and sets what is kept
// for the next agents.
func (w *world) mustShowCounts(t *testing.T, agent int, most float64, scrapes *int, kept map[maps.Reason]uint64, loads []*countedLoad) map[string]float64 {
	t.Helper()
	pinned, err := maps.Create(w.cfg.BPFRoot, maps.Options{
		Capacities: w.cfg.Capacities, Least: map[string]uint32{maps.NameFrontendIDs: 4096 + 64*uint32(agent/3)},
	})
	lab.Must(t, err)
	defer func() { lab.Must(t, pinned.Close()) }()
	// The flow of an exchange that is over is idle as soon as programs have noted it.
	const soon = time.Nanosecond
	sweeper, err := flow.New(flow.Config{Maps: pinned, Timeouts: flow.Timeouts{Closed: soon, TimeWait: soon, UDPAnswered: soon, UDPUnanswered: soon}})
	lab.Must(t, err)
	moved, began := uint64(0), time.Now()
	s, err := metrics.NewServices(metrics.ServicesConfig{
		Tables: pinned.Tables, Stats: pinned.Stats, Limit: 100,
		Moved: func() uint64 { return moved },
		Ended: sweeper.Bytes,
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
	for _, l := range loads {
		if l.inBursts() {
			l.start(t, lab.Load{Rate: 1000, Duration: 50 * time.Millisecond, Keep: 4})
		}
	}
	id := maps.ID(500, uint32(agent+1))
	lab.Must(t, pinned.Stats.Begin(id), pinned.ServicePorts.Put(id, maps.ServicePortOf("test", fmt.Sprintf("brief-%d", agent), "", 0, 0)))
	moved++
	for end := time.Now().Add(time.Duration(20+rand.IntN(60)) * time.Millisecond); time.Now().Before(end); {
		scrape()
		_, err := sweeper.Sweep()
		lab.Must(t, err)
	}
	for _, l := range loads {
		if l.inBursts() {
			l.stop(t)
		}
	}
	lab.Must(t, pinned.ServicePorts.Delete(id), pinned.Stats.End(id))
	moved++
	scrape()

	return last
}

// countersOf returns the values of counters and histograms, by name and values of labels.
func countersOf(families []*dto.MetricFamily) map[string]float64 {
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, label := range m.GetLabel() {
				name += " " + label.GetValue()
			}
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
