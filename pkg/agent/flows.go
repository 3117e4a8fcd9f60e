package agent

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// flowMonitor ends flows that are idle, or whose backend or frontend is gone. It has a
// goroutine of its own, because walks over large tables take long.
type flowMonitor struct {
	sweeper *flow.Sweeper
	log     *slog.Logger
	swept   func(flow.OriginalDsts) // called after each sweep with the addresses in use
	record  func(kube.Event)        // may be nil
	metrics *metrics.Sync           // may be nil
	stale   chan struct{}
	failing map[string]string // the error of the last round, by log message

	mu     sync.Mutex
	status flow.Status
}

// staleRest is the least time between searches for stale flows: each reads all flows, and
// backends may go one by one.
const staleRest = time.Second

func newFlowMonitor(cfg flow.Config, log *slog.Logger, swept func(flow.OriginalDsts)) (*flowMonitor, error) {
	sweeper, err := flow.New(cfg)
	if err != nil {
		return nil, err
	}

	return &flowMonitor{
		sweeper: sweeper,
		log:     log,
		swept:   swept,
		stale:   make(chan struct{}, 1),
		failing: make(map[string]string),
	}, nil
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
		m.log.Error("emergency: "+now.Emergency, "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	case before.Emergency != "" && now.Emergency == "":
		m.log.Info("the table of flows has room again", "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	}
	switch {
	case before.Flood == "" && now.Flood != "":
		m.log.Warn(now.Flood, "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	case before.Flood != "" && now.Flood == "":
		m.log.Info("the flood of new flows is over", "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	}
	m.mu.Lock()
	m.status = now
	m.mu.Unlock()
	if err == nil {
		m.swept(m.sweeper.OriginalDsts())
	}
}

// searchStale ends stale flows, and reports whether none is left.
func (m *flowMonitor) searchStale() bool {
	begin, before := time.Now(), m.sweeper.EndedStale()
	n, err := m.sweeper.EndStale()
	if m.metrics != nil {
		m.metrics.Cleaned(begin, endedSince(before, m.sweeper.EndedStale()))
	}
	if n > 0 {
		m.log.Info("ended UDP flows whose backend or frontend is gone", "flows", n)
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
		m.log.Error(what, "error", err)
	}
	m.failing[what] = text
}

// flowTimeouts returns the configured timeouts, with that of UDP which programs use.
func (c Config) flowTimeouts() flow.Timeouts {
	timeouts := c.FlowTimeouts
	timeouts.UDPAnswered = c.Datapath.UDPIdle

	return timeouts
}
