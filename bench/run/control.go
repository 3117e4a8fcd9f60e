package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
)

const (
	// mib is the unit of memory in reports.
	mib = 1 << 20
	// askedAfterStart is how many Services are asked whether a start is complete.
	askedAfterStart = 16
	// enough is how long the changes of one kind may take in all: of a proxy that takes
	// seconds for each, fewer are measured.
	enough = time.Minute
	// changesGrace is how long after the last of many changes a proxy may still be
	// busy with them.
	changesGrace = 3 * time.Second
)

// control measures the control plane of a side's proxy, which is the only one
// that runs.
type control struct {
	*bencher
	*side
	plan         objects.Plan
	round        int
	probe        *load.Probe
	kernelBefore int64 // the kernel's memory before the start, in bytes
}

// ofControl are the cases of the control plane.
var ofControl = []string{report.Start, report.Memory, report.ChangeQuiet, report.ChangeChurn, report.Updates}

func (b *bencher) control(ctx context.Context, s *side, plan objects.Plan, round int) {
	wanted := slices.ContainsFunc(ofControl, b.cases.MatchString)
	if s.kind == report.Ref || !wanted || ctx.Err() != nil {
		return
	}
	defer b.wake(s)()
	c := &control{bencher: b, side: s, plan: plan, round: round}
	steps := []struct {
		name    string
		measure func(context.Context) (values, error)
	}{
		{report.Start, c.start},
		{report.Memory, c.memory},
		{report.ChangeQuiet, c.quiet},
		{report.ChangeChurn, c.churning},
		{report.Updates, c.updates},
	}
	var err error
	for _, step := range steps {
		needed := step.name == report.Start // by all others
		if !needed && !b.cases.MatchString(step.name) {
			continue
		}
		var v values
		v, err = step.measure(ctx)
		at := report.Sample{Services: plan.Services, Case: step.name, Side: string(s.kind), Round: round}
		b.record(ctx, at, v, err)
		if err != nil && needed {
			break
		}
		for _, metric := range slices.Sorted(maps.Keys(v)) {
			at.Metric, at.Value = metric, v[metric]
			b.logf("%v", at)
		}
	}
	if err := errors.Join(c.close(), s.stop()); err != nil {
		b.fail(fmt.Errorf("end of %s: %w", s.kind, err))
	}
}

func (c *control) close() error {
	if c.probe == nil {
		return nil
	}

	return c.probe.Close()
}

// start is a cold start: until Services of all parts of the plan answer, and the
// proxy reports that it has programmed everything.
func (c *control) start(ctx context.Context) (values, error) {
	var err error
	if c.probe, err = load.StartProbe(c.Pod().Namespace, c.Cgroup); err != nil {
		return nil, err
	}
	if c.kernelBefore, err = proxy.StableKernelMemory(ctx); err != nil {
		return nil, err
	}
	if err := c.bencher.start(ctx, c.side, 0); err != nil {
		return nil, err
	}
	for k := range askedAfterStart {
		i := k * (c.plan.Services - 1) / (askedAfterStart - 1)
		target := netip.AddrPortFrom(c.plan.ClusterIP(i), objects.Port)
		if err := c.answered(ctx, target, c.plan.EndpointAddress(i, 1, 0)); err != nil { // which is never replaced
			return nil, err
		}
	}
	took := time.Since(c.proxy.Started())
	costs, err := c.proxy.Costs()
	if err != nil {
		return nil, err
	}

	return values{report.StartTime: took.Seconds(), report.StartCPU: costs.CPU.Seconds()}, nil
}

// memory reads what the proxy has when it has been left alone for a while.
func (c *control) memory(ctx context.Context) (values, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(c.rest):
	}
	costs, err := c.proxy.Costs()
	if err != nil {
		return nil, err
	}
	kernel, err := proxy.StableKernelMemory(ctx)
	if err != nil {
		return nil, err
	}

	return values{
		report.RSS:          float64(costs.RSS) / mib,
		report.PeakRSS:      float64(costs.PeakRSS) / mib,
		report.KernelMemory: float64(kernel-c.kernelBefore) / mib,
	}, nil
}

// quiet measures changes one by one.
func (c *control) quiet(ctx context.Context) (values, error) { return c.latencies(ctx) }

// churning measures them while many others are made.
func (c *control) churning(ctx context.Context) (values, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var churn sync.WaitGroup
	var failed error
	churn.Go(func() { failed = c.change(ctx, c.plan.Services, c.churn, 0) })
	v, err := c.latencies(ctx)
	stop()
	churn.Wait()

	return v, errors.Join(err, failed)
}

// updates measures what many changes cost the proxy.
func (c *control) updates(ctx context.Context) (values, error) {
	writes, counts, err := c.proxy.Writes() // which costs the agent something, too
	if err != nil {
		return nil, err
	}
	cfg, err := c.proxyConfig(c.side)
	if err != nil {
		return nil, err
	}
	watch, err := proxy.StartWatch(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer watch.Close()
	watchBefore, err := watch.CPU()
	if err != nil {
		return nil, err
	}
	before, err := c.proxy.Costs()
	if err != nil {
		return nil, err
	}
	if err := c.change(ctx, c.plan.Services, c.churn, c.options.updates); err != nil {
		return nil, err
	}
	// All are done when a later one is.
	if _, _, err := c.one(ctx); err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(changesGrace):
	}
	after, err := c.proxy.Costs()
	if err != nil {
		return nil, err
	}
	watchAfter, err := watch.CPU()
	if err != nil {
		return nil, err
	}
	n := float64(c.options.updates)
	cpu := (after.CPU - before.CPU).Seconds()
	v := values{
		report.CPUThousand: cpu * 1000 / n, report.CPUPerChange: cpu * 1000 / n,
		report.WatchCPU: (watchAfter - watchBefore).Seconds() * 1000 / n,
	}
	if counts {
		later, _, err := c.proxy.Writes()
		if err != nil {
			return nil, err
		}
		v[report.MapWrites] = float64(later-writes) / n
	}

	return v, nil
}

// latencies measures as many changes as there is time for.
func (c *control) latencies(ctx context.Context) (values, error) {
	var fromWrite, fromEvent []time.Duration
	for deadline := time.Now().Add(enough); len(fromWrite) < c.changes && time.Now().Before(deadline); {
		write, event, err := c.one(ctx)
		if err != nil {
			return nil, err
		}
		fromWrite, fromEvent = append(fromWrite, write), append(fromEvent, event)
	}
	slices.Sort(fromWrite)
	slices.Sort(fromEvent)

	return values{
		report.WriteP50: millis(fromWrite[len(fromWrite)/2]), report.WriteP99: millis(fromWrite[len(fromWrite)*99/100]),
		report.EventP50: millis(fromEvent[len(fromEvent)/2]), report.EventP99: millis(fromEvent[len(fromEvent)*99/100]),
	}, nil
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
