package main

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/watch"

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
	folder   string // for the files of the programs
	sides    []*side
	closers  []io.Closer

	events  <-chan observed
	watch   watch.Interface // of the events
	singles int             // how often the endpoint of the Service "single" was replaced
	changed int             // how often those of other Services were

	stolen []float64 // of each measurement of traffic, the part that the hypervisor took
}

// side is a proxy, and the cluster that it has for itself.
type side struct {
	*stand.Side
	kind  string
	proxy proxy.Proxy // nil: none runs
}

// bench makes the run: for each number of Services first the control plane of each proxy
// alone, then the traffic of all in turns. What was measured before an error or an
// interruption is in the report.
func bench(ctx context.Context, o *options, progress, text io.Writer) error {
	b := &bencher{options: o, progress: progress}
	err := b.setUp(ctx)
	for _, n := range o.services {
		if err != nil || ctx.Err() != nil {
			break
		}
		local, remote := b.sides[0].Places()
		plan := objects.Plan{Services: n, Endpoints: b.endpoints, Local: local, Remote: remote}
		begin := time.Now()
		if err := b.writer.Fill(ctx, plan, func(done, total int) {
			if done%1000 == 0 {
				b.logf("%d of %d Services are in the API server", done, total)
			}
		}); err != nil {
			b.fail(fmt.Errorf("%d Services: %w", n, err))

			break
		}
		b.logf("the API server has %d Services (%.0f s)", n, time.Since(begin).Seconds())
		for round := range b.starts {
			for _, s := range report.InTurn(b.sides, round) {
				b.control(ctx, s, plan, round)
			}
		}
		b.traffic(ctx, plan)
	}
	b.report.Interrupted = ctx.Err() != nil
	if slices.Sort(b.stolen); len(b.stolen) > 0 && b.report.Environment.Machine.Hypervisor {
		b.report.Environment.Notes = append(b.report.Environment.Notes, fmt.Sprintf(
			"The hypervisor gave other guests %.0f %% of the processors' time in the median measurement of traffic, %.0f %% in one of ten, %.0f %% in the worst; above %.0f %%, the best of %d attempts counts.",
			100*b.stolen[len(b.stolen)/2], 100*b.stolen[len(b.stolen)*9/10], 100*b.stolen[len(b.stolen)-1], 100*tolerable, attempts))
	}
	b.report.Environment.Elapsed = time.Since(b.report.Environment.Started)
	err = errors.Join(err, b.close())
	if len(b.report.Samples) > 0 {
		err = errors.Join(err, b.write(), b.report.WriteText(text))
	}

	return err
}

// setUp starts an API server and builds a cluster for each proxy.
func (b *bencher) setUp(ctx context.Context) (err error) {
	if err := b.describe(); err != nil {
		return err
	}
	b.logf("starting an API server")
	if b.folder, err = os.MkdirTemp("", "sluice-bench-"); err != nil {
		return fmt.Errorf("folder of the run: %w", err)
	}
	if b.sluice == "" {
		if b.sluice, err = sluice.Build(b.folder, "bench"); err != nil {
			return err
		}
	}
	directory := filepath.Join(b.folder, "api")
	if err := os.Mkdir(directory, 0o700); err != nil {
		return fmt.Errorf("folder of the API server: %w", err)
	}
	b.api, err = cluster.New(ctx, cluster.Config{Directory: directory, Flags: []string{"--service-cluster-ip-range=" + objects.ServiceRange}})
	if err != nil {
		return err
	}
	b.closers = append(b.closers, b.api)
	if b.writer, err = objects.NewWriter(b.api.Config()); err != nil {
		return err
	}
	if b.events, b.watch, err = watchEvents(ctx, b.api.Config()); err != nil {
		return err
	}
	for _, kind := range append([]string{report.Ref}, b.proxies...) {
		b.logf("building a cluster for %s", kind)
		s := &side{kind: kind}
		if s.Side, err = stand.New(); err != nil {
			return fmt.Errorf("cluster of %s: %w", kind, err)
		}
		b.closers = append(b.closers, s.Side)
		b.sides = append(b.sides, s)
		if err := s.Pause(); err != nil {
			return fmt.Errorf("cluster of %s: %w", kind, err)
		}
		if kind == report.Ref {
			continue
		}
		tunnel, err := b.api.Tunnel(s.Node().Namespace)
		if err != nil {
			return fmt.Errorf("cluster of %s: %w", kind, err)
		}
		b.closers = append(b.closers, tunnel)
	}

	return nil
}

// describe notes where and how the run is made.
func (b *bencher) describe() error {
	machine, err := report.ReadMachine()
	if err != nil {
		return err
	}
	b.report.Environment = report.Environment{
		Machine: machine, Command: strings.Join(os.Args, " "), Started: time.Now(), Versions: make(map[string]string),
		Sides: append([]string{report.Ref}, b.proxies...), Services: b.services, Endpoints: b.endpoints,
		Rounds: b.rounds, WarmUp: b.warmUp, Duration: b.duration, Starts: b.starts, Clients: b.clients,
		Rate: b.rate, Churn: b.churn, Changes: b.changes,
	}
	for _, program := range []string{"iptables", "nft", "iperf3"} {
		out, err := exec.Command(program, "--version").Output()
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
		b.report.Environment.Versions[program], _, _ = strings.Cut(string(out), "\n")
	}

	return nil
}

// start starts a side's proxy, and returns when it has programmed everything.
// resync is how often it does so again without a change; 0: its default.
func (b *bencher) start(ctx context.Context, s *side, resync time.Duration) error {
	directory, err := os.MkdirTemp(b.folder, s.kind)
	if err != nil {
		return fmt.Errorf("folder of %s: %w", s.kind, err)
	}
	cfg := proxy.Config{
		Kind: proxy.Kind(s.kind), Namespace: s.Node().Namespace, Cgroup: s.Cgroup, NodeName: s.Node().Name,
		Kubeconfig: b.api.Kubeconfig(), Binary: b.api.Binary("kube-proxy"), Directory: directory, ResyncPeriod: resync,
	}
	switch s.kind {
	case report.Sluice:
		cfg.Binary = b.sluice
	case report.Baseline:
		cfg.Binary = b.baseline
	}
	if s.proxy, err = proxy.Start(cfg); err != nil {
		return err
	}
	b.report.Environment.Versions[s.kind] = s.proxy.Version()

	return s.proxy.Synced(ctx)
}

// stop ends a side's proxy, and removes what it has programmed.
func (s *side) stop() error {
	if s.proxy == nil {
		return nil
	}
	err := s.proxy.Close()
	s.proxy = nil

	return err
}

// last returns the ClusterIP that the proxy finds last.
func (s *side) last(plan objects.Plan) (netip.Addr, error) {
	last := plan.ClusterIP(plan.Services - 1)
	order, err := s.proxy.Order([]netip.Addr{plan.ClusterIP(0), last})
	if err != nil {
		return last, err
	}

	return order[len(order)-1], nil
}

// wake lets a side's servers go on, until the function that it returns is called.
func (b *bencher) wake(s *side) (sleep func()) {
	if err := s.Resume(); err != nil {
		b.fail(err)
	}

	return func() {
		if err := s.Pause(); err != nil {
			b.fail(err)
		}
	}
}

// values are the results of one measurement, by metric.
type values map[string]float64

// record adds the results of one measurement to the report, but half a measurement,
// after an interruption.
func (b *bencher) record(ctx context.Context, at report.Sample, v values, err error) {
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		b.report.Gaps = append(b.report.Gaps, report.Gap{Services: at.Services, Case: at.Case, Path: at.Path, Side: at.Side, Round: at.Round, Why: err.Error()})
		b.logf("%s %s %s: %v", at.Side, at.Case, at.Path, err)
	}
	for _, metric := range slices.Sorted(maps.Keys(v)) {
		at.Metric, at.Value = metric, v[metric]
		b.report.Add(at)
	}
}

// write writes the report in all its forms.
func (b *bencher) write() error {
	err := b.report.WritePlots(b.output)
	for name, write := range map[string]func(io.Writer) error{
		"report.txt": b.report.WriteText,
		"report.md":  b.report.WriteMarkdown,
		"report.json.gz": func(w io.Writer) error {
			packed := gzip.NewWriter(w)

			return errors.Join(b.report.WriteJSON(packed), packed.Close())
		},
	} {
		file, failed := os.Create(filepath.Join(b.output, name))
		if failed == nil {
			failed = errors.Join(write(file), file.Close())
		}
		err = errors.Join(err, failed)
	}
	b.logf("the report is in %s", b.output)

	return err
}

// close ends all that runs and removes what was made.
func (b *bencher) close() error {
	b.logf("removing everything")
	var err error
	for _, s := range b.sides {
		err = errors.Join(err, s.stop())
	}
	if b.watch != nil {
		b.watch.Stop()
	}
	for _, c := range slices.Backward(b.closers) {
		err = errors.Join(err, c.Close())
	}

	return errors.Join(err, os.RemoveAll(b.folder))
}

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
