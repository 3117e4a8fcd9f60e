package agent

import (
	"context"
	"iter"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// flowMonitor ends flows that are idle, or whose backend or frontend is gone. It has a
// goroutine of its own, because walks over large tables take long.
type flowMonitor struct {
	cfg     flowMonitorConfig
	sweeper *flow.Sweeper
	stale   chan struct{}
	failing map[string]string // the error of the last round, by log message

	mu     sync.Mutex
	status flow.Status
}

type flowMonitorConfig struct {
	flow.Config
	swept   func(flow.OriginalDsts) // called after each sweep with the addresses in use
	record  func(kube.Event)
	metrics *metrics.Sync
	log     *slog.Logger
}

// staleRest is the least time between searches for stale flows: each reads all flows, and
// backends may go one by one.
const staleRest = time.Second

func newFlowMonitor(cfg flowMonitorConfig) (*flowMonitor, error) {
	sweeper, err := flow.New(cfg.Config)
	if err != nil {
		return nil, err
	}

	return &flowMonitor{cfg: cfg, sweeper: sweeper, stale: make(chan struct{}, 1), failing: make(map[string]string)}, nil
}

// endStale starts a search for the UDP flows of backends and frontends that are gone, and
// does not wait for it.
func (m *flowMonitor) endStale() {
	select {
	case m.stale <- struct{}{}:
	default:
	}
}

// known returns what the last sweep found.
func (m *flowMonitor) known() flow.Status {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.status
}

func (m *flowMonitor) run(ctx context.Context) error {
	sweep, search := time.NewTimer(0), time.NewTimer(0)
	defer sweep.Stop()
	defer search.Stop()
	search.Stop()
	var searched time.Time

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-sweep.C:
			m.sweep()
			sweep.Reset(m.sweeper.Next())
		case <-m.stale:
			search.Reset(time.Until(searched.Add(staleRest)))
		case <-search.C:
			if !m.searchStale() {
				m.endStale() // the next try
			}
			searched = time.Now()
		}
	}
}

// sweep ends idle flows, logs when the flow tables reach their limits, and passes on the
// original destinations of flows.
func (m *flowMonitor) sweep() {
	before := m.known()
	now, err := m.sweeper.Sweep()
	m.failed("flows are not swept; trying again", err)
	m.recordEmergency(before, now)
	switch {
	case before.Emergency == "" && now.Emergency != "":
		m.cfg.log.Error("emergency: "+now.Emergency, "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	case before.Emergency != "" && now.Emergency == "":
		m.cfg.log.Info("the table of flows has room again", "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	}
	switch {
	case before.Flood == "" && now.Flood != "":
		m.cfg.log.Warn(now.Flood, "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	case before.Flood != "" && now.Flood == "":
		m.cfg.log.Info("the flood of new flows is over", "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	}
	m.mu.Lock()
	m.status = now
	m.mu.Unlock()
	if err == nil {
		m.cfg.swept(m.sweeper.OriginalDsts())
	}
}

// searchStale ends stale flows, and reports whether none is left.
func (m *flowMonitor) searchStale() bool {
	begin, before := time.Now(), m.sweeper.EndedStale()
	n, err := m.sweeper.EndStale()
	after := m.sweeper.EndedStale()
	m.cfg.metrics.Cleaned(begin, map[lb.Family]int{
		lb.IPv4: int(after.IPv4 - before.IPv4), lb.IPv6: int(after.IPv6 - before.IPv6),
	})
	if n > 0 {
		m.cfg.log.Info("ended UDP flows whose backend or frontend is gone", "flows", n)
	}
	m.failed("UDP flows stay with backends or frontends that are gone; trying again", err)

	return err == nil
}

// failed logs an error, unless the round before failed with the same one.
func (m *flowMonitor) failed(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != m.failing[what] {
		m.cfg.log.Error(what, "error", err)
	}
	m.failing[what] = text
}

// endedBytes yields the bytes that clients have sent and received in flows that the agent
// has ended, by service port id.
func (m *flowMonitor) endedBytes() iter.Seq2[uint32, metrics.Bytes] {
	return func(yield func(uint32, metrics.Bytes) bool) {
		for id, b := range m.sweeper.Bytes() {
			if !yield(id, metrics.Bytes(b)) {
				return
			}
		}
	}
}

// recordEmergency records an Event when the table of flows is too small, or is no longer.
func (m *flowMonitor) recordEmergency(before, now flow.Status) {
	switch {
	case (before.Emergency == "") == (now.Emergency == ""):
	case now.Emergency != "":
		m.cfg.record(kube.Event{Reason: kube.ReasonFlowTableFull, Action: actionCheck, Note: now.Emergency})
	default:
		m.cfg.record(kube.Event{Reason: kube.ReasonFlowTableRelief, Action: actionCheck, Normal: true, Note: "the table of flows has room again"})
	}
}
