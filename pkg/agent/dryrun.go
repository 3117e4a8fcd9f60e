package agent

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// dryRunSlots is the capacity of the real slots map.
const dryRunSlots = 1 << 21

// dryRunLimits are the limits that follow from the sizes of the real maps in maps.h.
var dryRunLimits = lb.Limits{Frontends: 524288 / limitShare, SourceRanges: 65536 / limitShare, Endpoints: maxEndpoints}

// DryRun reads all Services once and returns how [Run] would program them, without
// touching the kernel: cfg needs no Datapath and no Socket.
func DryRun(ctx context.Context, cfg Config) ([]Service, error) {
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(dryRunSlots).Tables})
	if err != nil {
		return nil, err
	}
	cfg.limits = dryRunLimits
	a := &agent{cfg: cfg, writer: writer, model: newModel(cfg), queue: newEventQueue()}
	a.source, err = newSource(cfg, sink{a.queue})
	if err != nil {
		return nil, err
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	group.Go(func() error { return a.source.Run(ctx) })
	if err := a.waitForSource(ctx); err != nil {
		return nil, err
	}
	stop()
	if err := group.Wait(); err != nil {
		return nil, err
	}
	a.synced = true
	a.processQueue()
	a.applyAll()

	return a.services()(), nil
}

// waitForSource waits until all objects are received, and for the Node no longer than
// nodeWait.
func (a *agent) waitForSource(ctx context.Context) error {
	timeout := time.After(nodeWait)
	services, self := a.source.Synced(), a.source.NodeSynced()
	for services != nil || self != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the first complete list of Services: %w", ctx.Err())
		case <-services:
			services = nil
		case <-self:
			self = nil
		case <-timeout:
			self = nil
		}
	}

	return nil
}
