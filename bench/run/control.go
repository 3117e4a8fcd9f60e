package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/test/lab"
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
	// changeTimeout is how long a change may take to become effective.
	changeTimeout = 2 * time.Minute
	// changesAtOnce is how many of the requests that make churn are under way at once.
	changesAtOnce = 8
)

// control measures the control plane of a side's proxy, which is the only one
// that runs.
type control struct {
	*bencher
	*side
	plan         objects.Plan
	probe        *load.Probe
	kernelBefore int64 // the kernel's memory before the start, in bytes
}

func (b *bencher) control(ctx context.Context, s *side, plan objects.Plan, round int) {
	c := &control{bencher: b, side: s, plan: plan}
	type step struct {
		name    string
		measure func(context.Context) (values, error)
	}
	steps := []step{
		{report.Start, c.start}, // all others need it
		{report.Memory, c.memory},
		{report.ChangeQuiet, c.latencies},
		{report.ChangeChurn, c.churning},
		{report.Updates, c.updates},
	}
	if s.kind == report.Ref || !slices.ContainsFunc(steps, func(s step) bool { return b.cases.MatchString(s.name) }) || ctx.Err() != nil {
		return
	}
	defer b.wake(s)()
	for _, step := range steps {
		if step.name != report.Start && !b.cases.MatchString(step.name) {
			continue
		}
		v, err := step.measure(ctx)
		at := report.Sample{Services: plan.Services, Case: step.name, Side: s.kind, Round: round}
		b.record(ctx, at, v, err)
		if err != nil && step.name == report.Start {
			break
		}
		for _, metric := range slices.Sorted(maps.Keys(v)) {
			at.Metric, at.Value = metric, v[metric]
			b.logf("%v", at)
		}
	}
	var err error
	if c.probe != nil {
		err = c.probe.Close()
	}
	if err := errors.Join(err, s.stop()); err != nil {
		b.fail(fmt.Errorf("end of %s: %w", s.kind, err))
	}
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
		target, want := netip.AddrPortFrom(c.plan.ClusterIP(i), objects.Port), c.plan.EndpointAddress(i, 1, 0) // which is never replaced
		err := c.probe.Await(ctx, target, want, changeTimeout)
		if err == nil {
			_, err = c.probe.Wait(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("%v does not answer at %v: %w", want, target, err)
		}
	}
	took := time.Since(c.proxy.Started())
	costs, err := proxy.ReadCosts(c.proxy)
	if err != nil {
		return nil, err
	}

	return values{report.StartTime: took.Seconds(), report.StartCPU: costs.CPU.Seconds()}, nil
}

// memory reads the proxy's memory when it has been idle for a while.
func (c *control) memory(ctx context.Context) (values, error) {
	if err := sleep(ctx, c.rest); err != nil {
		return nil, err
	}
	costs, err := proxy.ReadCosts(c.proxy)
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

// latencies measures as many changes as there is time for, one by one.
func (c *control) latencies(ctx context.Context) (values, error) {
	var fromWrite, fromEvent []time.Duration
	for deadline := time.Now().Add(enough); len(fromWrite) < c.changes && time.Now().Before(deadline); {
		write, event, err := c.one(ctx)
		if err != nil {
			return nil, err
		}
		fromWrite, fromEvent = append(fromWrite, write), append(fromEvent, event)
	}
	// An event may reach the proxy before it reaches us: such a time is negative.
	quantile := func(all []time.Duration, percent int) float64 {
		slices.Sort(all)

		return micros(all[len(all)*percent/100]) / 1000
	}

	return values{
		report.WriteP50: quantile(fromWrite, 50), report.WriteP99: quantile(fromWrite, 99),
		report.EventP50: quantile(fromEvent, 50), report.EventP99: quantile(fromEvent, 99),
	}, nil
}

// one replaces the endpoint of the Service "single", and returns how long after
// the write, and after the API server's event, a client gets the new one.
func (c *control) one(ctx context.Context) (fromWrite, fromEvent time.Duration, err error) {
	c.singles++
	if err := c.probe.Await(ctx, netip.AddrPortFrom(objects.SingleIP, objects.Port), c.plan.SingleAddress(c.singles), changeTimeout); err != nil {
		return 0, 0, err
	}
	writeCtx, cancel := context.WithTimeoutCause(ctx, changeTimeout, fmt.Errorf("not written after %v", changeTimeout))
	defer cancel()
	begin := time.Now()
	err = c.writer.ChangeSingle(writeCtx, c.singles)
	var event time.Time
	if err == nil {
		event, err = c.event(writeCtx, c.plan.SingleAddress(c.singles))
	}
	if err != nil {
		return 0, 0, errors.Join(err, c.probe.Close()) // it has a question that does not count any more
	}
	first, err := c.probe.Wait(ctx)
	if err != nil {
		return 0, 0, fmt.Errorf("the change is not effective: %w", err)
	}

	return first.Sub(begin), first.Sub(event), nil
}

// churning measures changes one by one while many others are made.
func (c *control) churning(ctx context.Context) (values, error) {
	churnCtx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error)
	go func() { ended <- c.change(churnCtx, c.plan.Services, c.churn, 0) }()
	v, err := c.latencies(ctx)
	stop()

	return v, errors.Join(err, <-ended)
}

// change replaces endpoints at a steady rate, count of them or, with 0, until ctx
// ends, which is no error. It leaves alone the Services that are asked.
func (b *bencher) change(ctx context.Context, services, rate, count int) error {
	var requests errgroup.Group
	requests.SetLimit(changesAtOnce)
	due := time.NewTicker(time.Second / time.Duration(rate))
	defer due.Stop()
	for n := 0; count == 0 || n < count; n++ {
		select {
		case <-ctx.Done():
			return requests.Wait()
		case <-due.C:
		}
		b.changed++
		i, generation := b.changed%services, 1+b.changed/services
		requests.Go(func() error {
			if err := b.writer.Change(ctx, i, generation); err != nil && ctx.Err() == nil {
				return err
			}

			return nil
		})
	}

	return requests.Wait()
}

// updates measures the CPU time of many changes: of the proxy, and of a bare watch of
// the same events.
func (c *control) updates(ctx context.Context) (values, error) {
	writesBefore, counts, err := proxy.Writes(c.proxy) // costs the agent CPU, too
	if err != nil {
		return nil, err
	}
	cgroup, err := lab.NewCgroup("watch")
	if err != nil {
		return nil, err
	}
	defer cgroup.Close()
	watch, err := load.StartWatch(ctx, c.Node().Namespace, cgroup, c.api.Kubeconfig())
	if err != nil {
		return nil, err
	}
	defer watch.Close()
	cpu := func() (own, bare time.Duration, err error) {
		costs, err := proxy.ReadCosts(c.proxy)
		if err == nil {
			bare, err = proxy.ReadCPU(cgroup)
		}

		return costs.CPU, bare, err
	}
	ownBefore, bareBefore, err := cpu()
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
	if err := sleep(ctx, changesGrace); err != nil {
		return nil, err
	}
	own, bare, err := cpu()
	if err != nil {
		return nil, err
	}
	n := float64(c.options.updates)
	each := (own - ownBefore).Seconds() * 1000 / n
	// Milliseconds for each change are seconds for 1,000 of them.
	v := values{report.CPUThousand: each, report.CPUPerChange: each, report.WatchCPU: (bare - bareBefore).Seconds() * 1000 / n}
	if counts {
		writes, _, err := proxy.Writes(c.proxy)
		if err != nil {
			return nil, err
		}
		v[report.MapWrites] = float64(writes-writesBefore) / n
	}

	return v, nil
}

// sleep returns ctx's error if it ends before.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// observed is an endpoint of an event, and when it arrived.
type observed struct {
	address string
	at      time.Time
}

// watchEvents returns the API server's events of the Services for single measurements, until the
// watch is stopped: the agents get the same ones at about the same moment.
func watchEvents(ctx context.Context, config *rest.Config) (<-chan observed, watch.Interface, error) {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("client of the API server: %w", err)
	}
	watch, err := client.DiscoveryV1().EndpointSlices(objects.FewNamespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, nil, fmt.Errorf("watch of endpoints: %w", err)
	}
	events := make(chan observed, 1000)
	go func() {
		defer close(events)
		for event := range watch.ResultChan() {
			at := time.Now()
			if slice, ok := event.Object.(*discoveryv1.EndpointSlice); ok {
				for _, endpoint := range slice.Endpoints {
					events <- observed{endpoint.Addresses[0], at}
				}
			}
		}
	}()

	return events, watch, nil
}

// event returns when the event with an endpoint arrived.
func (b *bencher) event(ctx context.Context, address netip.Addr) (time.Time, error) {
	for {
		select {
		case <-ctx.Done():
			return time.Time{}, context.Cause(ctx)
		case o, ok := <-b.events:
			if !ok {
				return time.Time{}, errors.New("the API server has ended the watch")
			}
			if o.address == address.String() {
				return o.at, nil
			}
		}
	}
}
