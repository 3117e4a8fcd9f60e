package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/bench/stand"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/sluice"
)

// bencher is a run under way.
type bencher struct {
	*options
	progress io.Writer
	report   report.Run
	api      *cluster.Cluster
	writer   *objects.Writer
	folder   string // for what the programs write
	sides    []*side
	closers  []io.Closer

	events  *events
	singles int // how often the endpoint of the Service "single" was replaced
	changed int // how many others were

	stolen []float64 // of each measurement of traffic, what the hypervisor took
}

// side is a proxy, and the cluster that it has for itself.
type side struct {
	*stand.Side
	kind  proxy.Kind
	proxy *proxy.Proxy // nil: none runs
}

// bench does all of it. What was measured before an error or an interruption is
// in the report.
func bench(ctx context.Context, o *options, progress, text io.Writer) error {
	b := &bencher{options: o, progress: progress}
	err := b.setUp(ctx)
	if err == nil {
		b.measure(ctx)
	}
	b.report.Interrupted = ctx.Err() != nil
	b.noteStolen()
	b.report.Environment.Elapsed = time.Since(b.report.Environment.Started)
	err = errors.Join(err, b.Close())
	if len(b.report.Samples) > 0 {
		err = errors.Join(err, b.write(), b.report.WriteText(text))
	}

	return err
}

// setUp starts an API server and builds a cluster for each proxy.
func (b *bencher) setUp(ctx context.Context) error {
	if err := b.describe(); err != nil {
		return err
	}
	b.logf("starting an API server")
	folder, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return fmt.Errorf("folder of the run: %w", err)
	}
	b.folder = folder
	b.closers = append(b.closers, closer(func() error { return os.RemoveAll(folder) }))
	if b.sluice == "" {
		if b.sluice, err = sluice.Build(folder, "bench"); err != nil {
			return err
		}
	}
	if err := b.startAPI(ctx); err != nil {
		return err
	}
	if b.writer, err = objects.NewWriter(b.api.Config()); err != nil {
		return err
	}
	if b.events, err = watchEvents(ctx, b.api.Config()); err != nil {
		return err
	}
	b.closers = append(b.closers, b.events)
	for _, kind := range append([]string{report.Ref}, b.proxies...) {
		b.logf("building a cluster for %s", kind)
		if err := b.addSide(kind); err != nil {
			return fmt.Errorf("cluster of %s: %w", kind, err)
		}
	}

	return nil
}

func (b *bencher) startAPI(ctx context.Context) error {
	directory, err := os.MkdirTemp(b.folder, "api")
	if err != nil {
		return fmt.Errorf("folder of the API server: %w", err)
	}
	b.api, err = cluster.New(ctx, cluster.Config{
		Directory: directory,
		Flags:     []string{"--service-cluster-ip-range=" + objects.ServiceRange},
	})
	if err != nil {
		return err
	}
	b.closers = append(b.closers, b.api)

	return nil
}

func (b *bencher) addSide(kind string) error {
	s := &side{kind: proxy.Kind(kind)}
	var err error
	if s.Side, err = stand.New(); err != nil {
		return err
	}
	b.closers = append(b.closers, s.Side)
	b.sides = append(b.sides, s)
	if err := s.Pause(); err != nil {
		return err
	}
	if kind == report.Ref {
		return nil
	}
	tunnel, err := b.api.Tunnel(s.Node().Namespace)
	if err != nil {
		return err
	}
	b.closers = append(b.closers, tunnel)

	return nil
}

// measure measures each size: first the control plane of each proxy alone, then
// the traffic of all in turns.
func (b *bencher) measure(ctx context.Context) {
	for _, n := range b.services {
		local, remote := b.sides[0].Places()
		plan := objects.Plan{Services: n, Endpoints: b.endpoints, Local: local, Remote: remote}
		if err := b.fill(ctx, plan); err != nil {
			b.fail(fmt.Errorf("%d Services: %w", n, err))

			return
		}
		for round := range b.starts {
			for _, s := range b.inTurn(round) {
				b.control(ctx, s, plan, round)
			}
		}
		b.traffic(ctx, plan)
		if ctx.Err() != nil {
			return
		}
	}
}

func (b *bencher) fill(ctx context.Context, plan objects.Plan) error {
	begin := time.Now()
	err := b.writer.Fill(ctx, plan, func(done, total int) {
		if done%1000 == 0 {
			b.logf("%d of %d Services are in the API server", done, total)
		}
	})
	if err == nil {
		b.logf("the API server has %d Services (%.0f s)", plan.Services, time.Since(begin).Seconds())
	}

	return err
}

// inTurn returns the sides, backwards in every other round, so that the order gives
// none of them an advantage.
func (b *bencher) inTurn(round int) []*side {
	sides := slices.Clone(b.sides)
	if round%2 == 1 {
		slices.Reverse(sides)
	}

	return sides
}

// start starts a side's proxy, and returns when it has programmed everything.
// resync is how often it does so again without a reason; 0: as it likes.
func (b *bencher) start(ctx context.Context, s *side, resync time.Duration) error {
	cfg, err := b.proxyConfig(s)
	if err != nil {
		return err
	}
	cfg.ResyncPeriod = resync
	if s.proxy, err = proxy.Start(cfg); err != nil {
		return err
	}
	b.report.Environment.Versions[string(s.kind)] = s.proxy.Version()

	return s.proxy.Synced(ctx)
}

// proxyConfig is what a side's proxy is started with, and a folder of its own.
func (b *bencher) proxyConfig(s *side) (proxy.Config, error) {
	directory, err := os.MkdirTemp(b.folder, string(s.kind))
	if err != nil {
		return proxy.Config{}, fmt.Errorf("folder of %s: %w", s.kind, err)
	}

	return proxy.Config{
		Kind:       s.kind,
		Namespace:  s.Node().Namespace,
		Cgroup:     s.Cgroup,
		NodeName:   s.Node().Name,
		Kubeconfig: b.api.Kubeconfig(),
		Binary:     b.binary(s.kind),
		Directory:  directory,
	}, nil
}

// stop ends a side's proxy, and takes away what it has made.
func (s *side) stop() error {
	if s.proxy == nil {
		return nil
	}
	err := s.proxy.Close()
	s.proxy = nil

	return err
}

func (b *bencher) binary(kind proxy.Kind) string {
	switch kind {
	case proxy.Sluice:
		return b.sluice
	case proxy.Baseline:
		return b.baseline
	}

	return b.api.Binary("kube-proxy")
}

// last is the ClusterIP that the proxy finds last.
func (s *side) last(plan objects.Plan) (netip.Addr, error) {
	last := plan.ClusterIP(plan.Services - 1)
	if s.proxy == nil {
		return last, nil
	}
	order, err := s.proxy.Order([]netip.Addr{plan.ClusterIP(0), last})
	if err != nil {
		return last, err
	}

	return order[len(order)-1], nil
}

// Close ends all that runs and removes what was made.
func (b *bencher) Close() error {
	b.logf("removing everything")
	var err error
	for _, s := range b.sides {
		err = errors.Join(err, s.stop())
	}
	for _, c := range slices.Backward(b.closers) {
		err = errors.Join(err, c.Close())
	}

	return err
}

// closer is a function that is an [io.Closer].
type closer func() error

func (c closer) Close() error { return c() }

// logf writes a line of progress.
func (b *bencher) logf(format string, args ...any) {
	at := time.Since(b.report.Environment.Started).Round(time.Second)
	fmt.Fprintf(b.progress, "%7v  %s\n", at, fmt.Sprintf(format, args...))
}

// fail records an error that does not end the run.
func (b *bencher) fail(err error) {
	b.report.Errors = append(b.report.Errors, err.Error())
	b.logf("error: %v", err)
}
