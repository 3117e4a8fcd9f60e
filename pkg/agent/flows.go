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

// flowKeeper ends flows that are idle, or whose backend or frontend is gone. It
// runs on its own: large tables take their time.
type flowKeeper struct {
	sweeper *flow.Sweeper
	log     *slog.Logger
	swept   func(flow.Dialled) // told what each sweep found
	record  func(kube.Event)   // nil: nobody to tell
	metrics *metrics.Sync      // nil: nobody to tell
	stale   chan struct{}
	failing map[string]string // what the last round failed with, by what was done

	mu     sync.Mutex
	status flow.Status
}

// staleRest is the least time from one search for stale flows to the next:
// each reads all flows, and backends may go one by one.
const staleRest = time.Second

func newFlowKeeper(cfg flow.Config, log *slog.Logger, swept func(flow.Dialled)) (*flowKeeper, error) {
	sweeper, err := flow.New(cfg)
	if err != nil {
		return nil, err
	}

	return &flowKeeper{
		sweeper: sweeper,
		log:     log,
		swept:   swept,
		stale:   make(chan struct{}, 1),
		failing: make(map[string]string),
	}, nil
}

// endStale has the UDP flows of backends and frontends that are gone ended,
// soon.
func (k *flowKeeper) endStale() {
	select {
	case k.stale <- struct{}{}:
	default:
	}
}

// known returns what the last sweep found.
func (k *flowKeeper) known() flow.Status {
	k.mu.Lock()
	defer k.mu.Unlock()

	return k.status
}

func (k *flowKeeper) run(ctx context.Context) error {
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
			k.sweep()
			sweep.Reset(k.sweeper.Next())
		case <-k.stale:
			search.Reset(time.Until(searched.Add(staleRest)))
		case <-search.C:
			if !k.searchStale() {
				k.endStale() // the next try
			}
			searched = time.Now()
		}
	}
}

// sweep ends idle flows, takes stock, and tells what flows have dialled.
func (k *flowKeeper) sweep() {
	before := k.known()
	now, err := k.sweeper.Sweep()
	k.failed("flows are not swept; trying again", err)
	k.recordEmergency(before, now)
	switch {
	case before.Emergency == "" && now.Emergency != "":
		k.log.Error("emergency: "+now.Emergency, "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	case before.Emergency != "" && now.Emergency == "":
		k.log.Info("the table of flows has room again", "evicted", now.Flows.Evicted, "entries", now.Flows.Entries, "capacity", now.Flows.Capacity)
	}
	switch {
	case before.Flood == "" && now.Flood != "":
		k.log.Warn(now.Flood, "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	case before.Flood != "" && now.Flood == "":
		k.log.Info("the flood of new flows is over", "evicted", now.HalfOpen.Evicted, "entries", now.HalfOpen.Entries, "capacity", now.HalfOpen.Capacity)
	}
	k.mu.Lock()
	k.status = now
	k.mu.Unlock()
	if err == nil {
		k.swept(k.sweeper.Dialled())
	}
}

// searchStale ends stale flows, and says whether none is left.
func (k *flowKeeper) searchStale() bool {
	begin, before := time.Now(), k.sweeper.EndedStale()
	n, err := k.sweeper.EndStale()
	if k.metrics != nil {
		k.metrics.Cleaned(begin, endedSince(before, k.sweeper.EndedStale()))
	}
	if n > 0 {
		k.log.Info("ended UDP flows whose backend or frontend is gone", "flows", n)
	}
	k.failed("UDP flows stay with backends or frontends that are gone; trying again", err)

	return err == nil
}

// failed logs an error, unless it has been logged just before.
func (k *flowKeeper) failed(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != k.failing[what] {
		k.log.Error(what, "error", err)
	}
	k.failing[what] = text
}

// flowTimeouts are the configured ones, but for UDP as programs have it.
func (c Config) flowTimeouts() flow.Timeouts {
	timeouts := c.FlowTimeouts
	timeouts.UDPAnswered = c.Datapath.UDPIdle

	return timeouts
}
