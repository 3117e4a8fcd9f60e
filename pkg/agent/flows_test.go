package agent

import (
	"bytes"
	"context"
	"crypto/rand"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// capacity is that of both tables: of a smaller one the kernel keeps a large part
// free for each CPU.
const capacity = 4096

// mustMonitorFlows returns a monitor of the flows of maps that only the test has,
// and what it logs. The clock is *now.
func mustMonitorFlows(t *testing.T, now *uint64) (*flowMonitor, *maps.Pinned, *bytes.Buffer) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	root := "/sys/fs/bpf/sluice-agent-test-" + rand.Text()[:8]
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	pinned, err := maps.Create(root, maps.Options{Capacities: map[string]uint32{
		maps.NameAffinity: 16, maps.NameUDPPins: 16, maps.NameFlows: capacity, maps.NameHalfOpen: capacity, maps.NameUnanswered: capacity,
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pinned.Close() })
	log := new(bytes.Buffer)
	m, err := newFlowMonitor(flowMonitorConfig{
		Config: flow.Config{Maps: pinned, Now: func() uint64 { return *now }}, log: slog.New(slog.NewTextHandler(log, nil)),
		swept: func(flow.OriginalDsts) {}, record: func(kube.Event) {}, metrics: metrics.NewSync(time.Now),
	})
	if err != nil {
		t.Fatal(err)
	}

	return m, pinned, log
}

// mustPutFlow puts a UDP flow of one entry, to a backend that does not exist.
func mustPutFlow(t *testing.T, m *maps.Map[maps.FlowKey, maps.Flow], client int, seen uint64) maps.FlowKey {
	t.Helper()
	f := maps.Flow{
		Client: maps.AddrOf(netip.MustParseAddr("198.51.100.7")), ClientPort: uint16(client),
		OriginalDst: maps.AddrOf(netip.MustParseAddr("10.96.0.1")), OriginalPort: maps.Port(53),
		Proto: 17, Role: maps.FlowFromClient, State: maps.FlowOpen, LastSeen: seen,
	}
	if err := m.Put(f.Key(f.Role), f); err != nil {
		t.Fatal(err)
	}

	return f.Key(f.Role)
}

// An emergency and a flood are logged when they begin and when they are over, with
// numbers, and not at each sweep.
func TestFlowsAtTheirLimit(t *testing.T) {
	const puts, begin = 2 * capacity, uint64(time.Hour)
	for _, test := range []struct {
		table, level, logs, over string
		index                    uint32 // in flow_counts
		capacity                 string
	}{
		{"flows", "ERROR", "--flow-table-memory", "the table of flows has room again", 0, "capacity=4096"},
		{"half open", "WARN", "flood", "the flood of new flows is over", 2, "capacity=8192"}, // with that of connections
	} {
		t.Run(test.table, func(t *testing.T) {
			now := begin
			m, pinned, log := mustMonitorFlows(t, &now)
			m.sweep()
			if log.Len() > 0 {
				t.Errorf("logged at the start: %s", log)
			}
			table := pinned.Flows
			if test.index != 0 {
				table = pinned.Unanswered
			}
			for n := range puts {
				mustPutFlow(t, table, n, now)
			}
			perCPU := make([]uint64, ebpf.MustPossibleCPU())
			perCPU[0] = puts
			if err := pinned.Replacements()["sl_flow_counts"].Put(test.index, perCPU); err != nil {
				t.Fatal(err)
			}
			m.sweep()
			m.sweep()
			status := m.known()
			if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), test.logs) ||
				!strings.Contains(log.String(), "level="+test.level) || !strings.Contains(log.String(), test.capacity) {
				t.Errorf("logged, in %d lines, want one with %s and %s:\n%s", lines, test.level, test.logs, log)
			}
			if status.Emergencies+status.Floods != 1 || status.Flows.Evicted+status.HalfOpen.Evicted < puts-capacity {
				t.Errorf("status %+v, want one alarm and at least %d evictions", status, puts-capacity)
			}
			log.Reset()
			now += uint64(time.Hour)
			m.sweep()
			m.sweep()
			if lines := strings.Count(log.String(), "\n"); lines != 1 || !strings.Contains(log.String(), test.over) {
				t.Errorf("logged, in %d lines, want one with %q:\n%s", lines, test.over, log)
			}
		})
	}
}

// What fails again and again is logged once.
func TestFlowsFailing(t *testing.T) {
	var now uint64
	m, pinned, log := mustMonitorFlows(t, &now)
	if err := pinned.Replacements()["sl_flows"].Close(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		m.sweep()
		if m.searchStale() {
			t.Error("it reports that nothing stale is left, but the search failed")
		}
	}
	if lines := strings.Count(log.String(), "\n"); lines != 2 {
		t.Errorf("logged, in %d lines, want one of sweeps and one of stale flows:\n%s", lines, log)
	}
}

// The monitor sweeps at once, and ends stale flows when endStale is called.
func TestFlowMonitorRuns(t *testing.T) {
	now := uint64(time.Hour)
	m, pinned, log := mustMonitorFlows(t, &now)
	idle := mustPutFlow(t, pinned.Flows, 1, 0)
	stale := mustPutFlow(t, pinned.Flows, 2, now)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.run(ctx) }()
	mustVanish(t, pinned, idle)
	if _, ok, err := pinned.Flows.Lookup(stale); !ok || err != nil {
		t.Errorf("the stale flow: %v, %v; want it there until endStale is called", ok, err)
	}
	m.endStale()
	mustVanish(t, pinned, stale)
	another := mustPutFlow(t, pinned.Unanswered, 3, now)
	begin := time.Now()
	m.endStale()
	mustVanish(t, pinned, another)
	if took := time.Since(begin); took < staleRest/2 {
		t.Errorf("searched again after %v, want a rest of %v", took, staleRest)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := strings.Count(log.String(), "ended UDP flows"); n != 2 {
		t.Errorf("logged %d times, want 2:\n%s", n, log)
	}
	if status := m.known(); status.Flows.Capacity != capacity || status.Expired != 1 {
		t.Errorf("status %+v, want a capacity of %d and one flow expired", status, capacity)
	}
}

// While the table is full, the monitor sweeps every second.
func TestFlowMonitorSweepsAFullTableOften(t *testing.T) {
	now := uint64(time.Hour)
	m, pinned, _ := mustMonitorFlows(t, &now)
	for n := range pinned.Flows.Capacity() {
		mustPutFlow(t, pinned.Flows, n, now)
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- m.run(ctx) }()
	for deadline := time.Now().Add(10 * time.Second); m.known().Emergency == ""; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no emergency with all of the table filled: %+v", m.known())
		}
	}
	mustVanish(t, pinned, mustPutFlow(t, pinned.Flows, 65000, 0))
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// mustVanish waits for the end of a flow, in whichever table it is.
func mustVanish(t *testing.T, pinned *maps.Pinned, key maps.FlowKey) {
	t.Helper()
	for deadline := time.Now().Add(8 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		_, inFlows, err := pinned.Flows.Lookup(key)
		if err != nil {
			t.Fatal(err)
		}
		_, inHalfOpen, err := pinned.Unanswered.Lookup(key)
		if err != nil {
			t.Fatal(err)
		}
		if !inFlows && !inHalfOpen {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the flow does not end")
		}
	}
}
