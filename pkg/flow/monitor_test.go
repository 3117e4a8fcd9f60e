package flow

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// capacity is that of both tables: of a smaller one the kernel keeps a large part
// free for each CPU.
const capacity = 4096

// monitored is a monitor, with what it logs and reports.
type monitored struct {
	*Monitor
	log         *bytes.Buffer
	emergencies []string
	searches    []Ended
}

// mustMonitor returns a monitor of the flows of a new world.
func mustMonitor(t *testing.T) (*monitored, *world) {
	t.Helper()
	w := newWorld(t, capacity)
	m := &monitored{log: new(bytes.Buffer)}
	var err error
	m.Monitor, err = NewMonitor(MonitorConfig{
		Config: Config{Maps: w.Pinned, Now: func() uint64 { return w.clock }}, Log: slog.New(slog.NewTextHandler(m.log, nil)),
		Swept:     func(OriginalDsts) {},
		Searched:  func(_ time.Time, ended Ended) { m.searches = append(m.searches, ended) },
		Emergency: func(why string) { m.emergencies = append(m.emergencies, why) },
	})
	lab.Must(t, err)

	return m, w
}

// mustPutFlow puts a UDP flow of one entry, to a backend that does not exist.
func mustPutFlow(t *testing.T, m *maps.Map[maps.FlowKey, maps.Flow], client int, seen uint64) maps.FlowKey {
	t.Helper()
	f := maps.Flow{
		Client: addr("198.51.100.7"), ClientPort: uint16(client),
		OriginalDst: addr("10.96.0.1"), OriginalPort: maps.Port(53),
		Proto: 17, Role: maps.FlowFromClient, State: maps.FlowOpen, LastSeen: seen,
	}
	lab.Must(t, m.Put(f.Key(f.Role), f))

	return f.Key(f.Role)
}

// What is counted since the maps were made is known before the first sweep: metrics that show zero first,
// and all of it afterwards, would show growth that there was not.
func TestStatusBeforeTheFirstSweep(t *testing.T) {
	w := newWorld(t, capacity)
	for index, count := range map[uint32]int{flowsRepaired: 3, masqueradeRetries: 5, stackPorts: 7} {
		w.setCount(t, index, count)
	}
	m, err := NewMonitor(MonitorConfig{Config: Config{Maps: w.Pinned, Now: func() uint64 { return w.clock }}})
	lab.Must(t, err)
	if s := m.Status(); s.Repaired != 3 || s.MasqueradeRetries != 5 || s.StackPorts != 7 {
		t.Errorf("%d repaired, %d retries, %d stack ports; want 3, 5 and 7", s.Repaired, s.MasqueradeRetries, s.StackPorts)
	}
}

// An emergency and a flood are logged when they begin and when they are over, with
// numbers, and not at each sweep.
func TestFlowsAtTheirLimit(t *testing.T) {
	const puts = 2 * capacity
	for _, test := range []struct {
		table, level, logs, over string
		index                    uint32 // in flow_counts
		capacity                 string
	}{
		{"flows", "ERROR", "--flow-table-memory", "the table of flows has room again", 0, "capacity=4096"},
		{"half open", "WARN", "flood", "the flood of new flows is over", 2, "capacity=8192"}, // with that of connections
	} {
		t.Run(test.table, func(t *testing.T) {
			m, w := mustMonitor(t)
			m.sweep()
			if m.log.Len() > 0 {
				t.Errorf("logged at the start: %s", m.log)
			}
			table := w.Flows
			if test.index != 0 {
				table = w.Unanswered
			}
			for n := range puts {
				mustPutFlow(t, table, n, w.clock)
			}
			perCPU := make([]uint64, ebpf.MustPossibleCPU())
			perCPU[0] = puts
			lab.Must(t, w.Replacements()["sl_flow_counts"].Put(test.index, perCPU))
			m.sweep()
			m.sweep()
			status := m.Status()
			if lines := strings.Count(m.log.String(), "\n"); lines != 1 || !strings.Contains(m.log.String(), test.logs) ||
				!strings.Contains(m.log.String(), "level="+test.level) || !strings.Contains(m.log.String(), test.capacity) {
				t.Errorf("logged, in %d lines, want one with %s and %s:\n%s", lines, test.level, test.logs, m.log)
			}
			if status.Emergencies+status.Floods != 1 || status.Flows.Evicted+status.HalfOpen.Evicted < puts-capacity {
				t.Errorf("status %+v, want one alarm and at least %d evictions", status, puts-capacity)
			}
			m.log.Reset()
			w.clock += uint64(time.Hour)
			m.sweep()
			m.sweep()
			if lines := strings.Count(m.log.String(), "\n"); lines != 1 || !strings.Contains(m.log.String(), test.over) {
				t.Errorf("logged, in %d lines, want one with %q:\n%s", lines, test.over, m.log)
			}
			if n := len(m.emergencies); test.level != "ERROR" && n > 0 {
				t.Errorf("a flood is reported as an emergency: %q", m.emergencies)
			} else if test.level == "ERROR" && (n != 2 || m.emergencies[0] != status.Emergency || m.emergencies[1] != "") {
				t.Errorf("reported emergencies are %q, want %q and their end", m.emergencies, status.Emergency)
			}
		})
	}
}

// What fails again and again is logged once.
func TestFlowsFailing(t *testing.T) {
	m, w := mustMonitor(t)
	lab.Must(t, w.Replacements()["sl_flows"].Close())
	for range 3 {
		m.sweep()
		if m.searchStale() {
			t.Error("it reports that nothing stale is left, but the search failed")
		}
	}
	if lines := strings.Count(m.log.String(), "\n"); lines != 2 {
		t.Errorf("logged, in %d lines, want one of sweeps and one of stale flows:\n%s", lines, m.log)
	}
}

// The monitor sweeps at once, and ends stale flows when EndStale is called.
func TestFlowMonitorRuns(t *testing.T) {
	m, w := mustMonitor(t)
	idle := mustPutFlow(t, w.Flows, 1, 0)
	stale := mustPutFlow(t, w.Flows, 2, w.clock)
	end := lab.MustRun(t, m.Run)
	mustVanish(t, w, idle)
	if _, ok, err := w.Flows.Lookup(stale); !ok || err != nil {
		t.Errorf("the stale flow: %v, %v; want it there until EndStale is called", ok, err)
	}
	m.EndStale()
	mustVanish(t, w, stale)
	another := mustPutFlow(t, w.Unanswered, 3, w.clock)
	begin := time.Now()
	m.EndStale()
	mustVanish(t, w, another)
	if took := time.Since(begin); took < staleRest/2 {
		t.Errorf("searched again after %v, want a rest of %v", took, staleRest)
	}
	end()
	if n := strings.Count(m.log.String(), "ended UDP flows"); n != 2 {
		t.Errorf("logged %d times, want 2:\n%s", n, m.log)
	}
	if want := []Ended{{IPv4: 1}, {IPv4: 1}}; !slices.Equal(m.searches, want) {
		t.Errorf("reported searches are %+v, want %+v", m.searches, want)
	}
	if status := m.Status(); status.Flows.Capacity != capacity || status.Expired != 1 {
		t.Errorf("status %+v, want a capacity of %d and one flow expired", status, capacity)
	}
}

// While the table is full, the monitor sweeps every second.
func TestFlowMonitorSweepsAFullTableOften(t *testing.T) {
	m, w := mustMonitor(t)
	for n := range w.Flows.Capacity() {
		mustPutFlow(t, w.Flows, n, w.clock)
	}
	lab.MustRun(t, m.Run)
	lab.EventuallyIn(t, 10*time.Second, "an emergency, with all of the table filled", func() bool { return m.Status().Emergency != "" })
	mustVanish(t, w, mustPutFlow(t, w.Flows, 65000, 0))
}

// mustVanish waits for the end of a flow, in whichever table it is.
func mustVanish(t *testing.T, w *world, key maps.FlowKey) {
	t.Helper()
	lab.EventuallyIn(t, 8*time.Second, "the flow ends", func() bool {
		_, inFlows, err := w.Flows.Lookup(key)
		lab.Must(t, err)
		_, unanswered, err := w.Unanswered.Lookup(key)
		lab.Must(t, err)

		return !inFlows && !unanswered
	})
}

// Searches for stale flows take at most a twentieth of a processor, however large the tables are: an endpoint that comes and
// goes all the time starts one after the other.
func TestRestAfterSearch(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{
		0: time.Second, 10 * time.Millisecond: time.Second, 300 * time.Millisecond: 6 * time.Second,
	} {
		if got := restAfter(took); got != want {
			t.Errorf("after %v it rests %v, want %v", took, got, want)
		}
	}
}
