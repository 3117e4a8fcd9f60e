package flow

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Monitor ends flows that are idle, or whose backend or frontend is gone. It has a goroutine
// of its own ([Monitor.Run]), because walks over large tables take long. Any goroutine may call
// its other exported methods.
type Monitor struct {
	cfg     MonitorConfig
	sweeper *Sweeper
	stale   chan struct{}
	failing map[string]string // the error of the last round, by log message

	mu     sync.Mutex
	status Status
}

// MonitorConfig configures a [Monitor]. The functions are called by its goroutine.
type MonitorConfig struct {
	Config
	// Swept is called after each successful sweep with the original destinations of flows.
	Swept func(OriginalDsts)
	// Searched is called after each search for stale flows with when it began, and how many
	// flows it has ended.
	Searched func(begin time.Time, ended Ended)
	// Emergency is called with why the table of flows is too small when that begins
	// ([Status.Emergency]), and with "" when it is over.
	Emergency func(why string)
	Log       *slog.Logger
}

// staleRest is the least time between searches for stale flows: each reads all flows, and
// backends may go one by one. It is restFactor times that of the last search if that took long.
const staleRest = time.Second

// restAfter returns how long to rest after a search that took so long.
func restAfter(took time.Duration) time.Duration { return max(staleRest, restFactor*took) }

// NewMonitor returns a monitor that has not swept yet.
func NewMonitor(cfg MonitorConfig) (*Monitor, error) {
	sweeper, err := New(cfg.Config)
	if err != nil {
		return nil, err
	}

	return &Monitor{cfg: cfg, sweeper: sweeper, stale: make(chan struct{}, 1), failing: make(map[string]string), status: sweeper.status}, nil
}

// EndStale starts a search for the UDP flows of backends and frontends that are gone, and
// does not wait for it.
func (m *Monitor) EndStale() {
	select {
	case m.stale <- struct{}{}:
	default:
	}
}

// Status returns what the last sweep found; before the first one, only what is counted since the maps
// were made.
func (m *Monitor) Status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()

	return m.status
}

// EndedBytes returns the bytes of ended flows, see [Sweeper.Bytes].
func (m *Monitor) EndedBytes() map[uint32]Bytes { return m.sweeper.Bytes() }

// Run sweeps at intervals, and searches for stale flows when [Monitor.EndStale] was called,
// until ctx ends. It returns nil.
func (m *Monitor) Run(ctx context.Context) error {
	sweep, search := time.NewTimer(0), time.NewTimer(0)
	defer sweep.Stop()
	defer search.Stop()
	search.Stop()
	var rested time.Time // when the next search may begin

	for {
		select {
		case <-ctx.Done():
			return nil
		case <-sweep.C:
			m.sweep()
			sweep.Reset(m.sweeper.Next())
		case <-m.stale:
			search.Reset(time.Until(rested))
		case <-search.C:
			begin := time.Now()
			if !m.searchStale() {
				m.EndStale() // the next try
			}
			rested = time.Now().Add(restAfter(time.Since(begin)))
		}
	}
}

// sweep ends idle flows, logs when the flow tables reach their limits, and passes on the
// original destinations of flows.
func (m *Monitor) sweep() {
	before := m.Status()
	now, err := m.sweeper.Sweep()
	m.failed("flows are not swept; trying again", err)
	switch {
	case before.Emergency == "" && now.Emergency != "":
		m.cfg.Log.Error("emergency: "+now.Emergency, "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
		m.cfg.Emergency(now.Emergency)
	case before.Emergency != "" && now.Emergency == "":
		m.cfg.Log.Info("the table of flows has room again", "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
		m.cfg.Emergency("")
	}
	switch {
	case before.Flood == "" && now.Flood != "":
		m.cfg.Log.Warn(now.Flood, "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	case before.Flood != "" && now.Flood == "":
		m.cfg.Log.Info("the flood of new flows is over", "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	}
	m.mu.Lock()
	m.status = now
	m.mu.Unlock()
	if err == nil {
		m.cfg.Swept(m.sweeper.OriginalDsts())
	}
}

// searchStale ends stale flows, and reports whether none is left.
func (m *Monitor) searchStale() bool {
	begin := time.Now()
	ended, err := m.sweeper.EndStale()
	m.cfg.Searched(begin, ended)
	if n := ended.IPv4 + ended.IPv6; n > 0 {
		m.cfg.Log.Info("ended UDP flows whose backend or frontend is gone", "flows", n)
	}
	m.failed("UDP flows stay with backends or frontends that are gone; trying again", err)

	return err == nil
}

// failed logs an error, unless the round before failed with the same one.
func (m *Monitor) failed(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != m.failing[what] {
		m.cfg.Log.Error(what, "error", err)
	}
	m.failing[what] = text
}
