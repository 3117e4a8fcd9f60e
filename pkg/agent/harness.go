package agent

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// dryRunSlots is the capacity of the real slots map.
const dryRunSlots = 1 << 21

// dryRunLimits are the limits that follow from the sizes of the real maps in maps.h.
var dryRunLimits = lb.Limits{Frontends: 524288 / limitShare, SourceRanges: 65536 / limitShare, Endpoints: maxEndpoints}

// DryRun reads all Services once and returns how [Run] would program them, without
// touching the kernel: cfg needs no Datapath and no Socket.
func DryRun(ctx context.Context, cfg Config) ([]status.Service, error) {
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(dryRunSlots).Tables})
	if err != nil {
		return nil, err
	}
	cfg.limits = dryRunLimits
	queue := newEventQueue(nil, time.Now)
	source, err := newSource(cfg, sink{queue})
	if err != nil {
		return nil, err
	}
	a := newAgent(cfg, parts{queue: queue, source: source, writer: writer})

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

	return a.services().Services(), nil
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

// TestHarness is the part of an agent that decides what is in the maps, without what needs a
// kernel or an API server. A test supplies the objects and decides when changes are applied.
// One goroutine at a time may use it.
type TestHarness struct{ agent *agent }

// NewTestHarness returns an agent that writes with writer, whose clock is now. Of cfg it
// uses the fields about Services, and Log.
func NewTestHarness(cfg Config, writer *reconcile.Reconciler, now func() time.Time) *TestHarness {
	return &TestHarness{newAgent(cfg, parts{queue: newEventQueue(nil, time.Now), writer: writer, now: now})}
}

// Sink receives the objects of the cluster.
func (r *TestHarness) Sink() kube.Sink { return sink{r.agent.queue} }

// SetAddresses sets the addresses of this node.
func (r *TestHarness) SetAddresses(addrs []node.Address) {
	r.agent.queue.enqueue(func(m *model) { m.setLocalAddrs(addrs) })
}

// Work applies the changes since the last call, and programs what follows from them. Failed
// writes, and those that wait for a grace period, stay due in the writer. Before the first
// call, the sink must have received all objects.
func (r *TestHarness) Work() {
	if r.agent.synced {
		r.agent.processQueue()
		r.agent.applyAll()

		return
	}
	r.agent.queue.enqueue((*model).stopWaiting) // the Node is complete
	r.agent.processQueue()
	r.agent.takeOver()
}

// Resolve returns the resolution of a Service, or false if there is none of that name.
func (r *TestHarness) Resolve(name lb.ServiceName) (lb.Resolution, bool) {
	return r.agent.model.state.Resolve(name)
}
