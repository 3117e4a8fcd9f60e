package agent

import (
	"context"
	"iter"

	"github.com/sluice-lb/sluice/pkg/metrics"
)

// newServiceMetrics returns the metrics of each Service, nil if they are switched off.
func (a *agent) newServiceMetrics() (*metrics.Services, error) {
	if a.cfg.ServiceMetrics == 0 {
		return nil, nil
	}
	m := a.datapath.Maps()

	return metrics.NewServices(metrics.ServicesConfig{
		Tables: metrics.Tables{ServicePorts: m.ServicePorts, Backends: m.Backends, Loads: m.Loads},
		Stats:  m.Stats,
		Ended:  a.endedBytes,
		Limit:  a.cfg.ServiceMetrics,
		Moved:  a.written.Load,
	})
}

// endedBytes yields the bytes that clients have sent and received in flows that the agent
// has ended, by service port id.
func (a *agent) endedBytes() iter.Seq2[uint32, metrics.Bytes] {
	return func(yield func(uint32, metrics.Bytes) bool) {
		for id, b := range a.flows.sweeper.Bytes() {
			if !yield(id, metrics.Bytes(b)) {
				return
			}
		}
	}
}

// runServiceMetrics adds the counts of removed service ports at intervals, until ctx ends.
func (a *agent) runServiceMetrics(ctx context.Context) error {
	if a.counts == nil {
		return nil
	}

	return a.counts.Run(ctx, func(err error) {
		if err != nil {
			a.cfg.Log.Error("counts of Services are not read; trying again", "error", err)
		}
	})
}
