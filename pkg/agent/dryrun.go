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

// dryRunSlots is room for what fits into the real map.
const dryRunSlots = 1 << 21

// dryRunLimits are those of the real maps, as they are sized in maps.h.
var dryRunLimits = lb.Limits{Frontends: 524288 / limitShare, SourceRanges: 65536 / limitShare, Endpoints: maxEndpoints}

// DryRun reads all Services once and returns what [Run] would make of them,
// without touching the kernel: cfg needs no Datapath and no Socket.
func DryRun(ctx context.Context, cfg Config) ([]Service, error) {
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(dryRunSlots).Tables})
	if err != nil {
		return nil, err
	}
	cfg.limits = dryRunLimits
	a := &agent{cfg: cfg, writer: writer, model: newModel(cfg), mail: newMailbox()}
	a.source, err = newSource(cfg, sink{a.mail})
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
	a.readMail()
	a.applyAll()

	return a.services()(), nil
}

// waitForSource waits until everything was told; for the Node not forever.
func (a *agent) waitForSource(ctx context.Context) error {
	patience := time.After(nodeWait)
	services, self := a.source.Synced(), a.source.NodeSynced()
	for services != nil || self != nil {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the first complete list of Services: %w", ctx.Err())
		case <-services:
			services = nil
		case <-self:
			self = nil
		case <-patience:
			self = nil
		}
	}

	return nil
}
