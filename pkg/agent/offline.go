package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/maglev"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
)

// dryRunSlots is the capacity of the slots map of a dry run, whose tables by hash are small: nothing is
// looked up in them.
const dryRunSlots = 1 << 21

// DryRun reads all Services once and returns how [Run] would program them, and what of the objects is not in force, without
// touching the kernel: cfg needs no Datapath and no Socket.
func DryRun(ctx context.Context, cfg Config) ([]status.Service, []lb.Problem, error) {
	writer, err := reconcile.New(reconcile.Config{Tables: maps.NewFakes(dryRunSlots).Tables, TableSize: maglev.Sizes[0]})
	if err != nil {
		return nil, nil, err
	}
	offline := NewOffline(cfg, writer)
	source, err := newSource(cfg, offline.Sink())
	if err != nil {
		return nil, nil, err
	}

	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	group.Go(func() error { return source.Run(ctx) })
	if err := waitForSource(ctx, source); err != nil {
		return nil, nil, err
	}
	stop()
	if err := group.Wait(); err != nil {
		return nil, nil, err
	}
	offline.Work()

	a := offline.agent
	snapshots := slices.Collect(a.model.state.Snapshots())

	return slices.Collect(a.modelOf(snapshots, a.writer.Statuses(), a.model.problems).Services()), offline.Status().Problems, nil
}

// waitForSource waits until all objects are received, and for the Node no longer than
// nodeWait.
func waitForSource(ctx context.Context, from source) error {
	timeout := time.After(nodeWait)
	services, self := from.Synced(), from.NodeSynced()
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

// Offline is the part of an agent that decides what is in the maps, without what needs a
// kernel or an API server. The caller supplies the objects and decides when changes are applied.
// One goroutine at a time may use it.
type Offline struct{ agent *agent }

// NewOffline returns an agent that writes with writer. Of cfg it
// uses the fields about Services, and Log. One Service may take as much as of the real maps.
func NewOffline(cfg Config, writer *reconcile.Reconciler) *Offline {
	return &Offline{newAgent(cfg, parts{
		queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), writer: writer, limits: reconcile.DefaultLimits,
	})}
}

// Sink receives the objects of the cluster.
func (o *Offline) Sink() kube.Sink { return sink{o.agent.queue, o.agent.metrics} }

// SetState sets what the kernel has of this node.
func (o *Offline) SetState(state node.State) {
	o.agent.queue.Enqueue(func(m *model) { m.here.SetState(state) })
}

// Status returns the status of an agent that runs, without what only a kernel has.
func (o *Offline) Status() status.Status {
	return statusOf(o.agent.state(), o.agent.writer.Statuses(), o.agent.model.problems)
}

// Work applies the changes since the last call, and programs what follows from them. Failed
// writes, and those that wait for a grace period, stay due in the writer. Before the first
// call, the sink must have received all objects.
func (o *Offline) Work() {
	if o.agent.synced {
		o.agent.processQueue()
		o.agent.applyAll()

		return
	}
	o.agent.queue.Enqueue(func(m *model) {
		m.here.ObjectReceived()
		m.here.StopWaiting() // the Node is complete
	})
	o.agent.processQueue()
	o.agent.takeOver()
}

// Resolve returns the resolution of a Service, or false if there is none of that name.
func (o *Offline) Resolve(name lb.ServiceName) (lb.Resolution, bool) {
	return o.agent.model.state.Resolve(name)
}
