package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/report"
)

// profiled are the paths on which Sluice's programs are watched, with the traffic
// of the case "connect".
var profiled = []string{report.Direct, report.ServiceFirst, report.NodePortNear, report.NodePortFar}

// profile finds out how often each of Sluice's programs runs for a connection, and
// how long that takes. The kernel's statistics are on only meanwhile.
func (b *bencher) profile(ctx context.Context, s *side, plan objects.Plan) {
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		b.fail(fmt.Errorf("statistics of programs: %w", err))

		return
	}
	defer stats.Close()
	defer b.wake(s)()
	for _, path := range profiled {
		if ctx.Err() != nil {
			return
		}
		v, err := b.watchPrograms(ctx, s, plan, path)
		b.record(ctx, report.Sample{Services: plan.Services, Case: report.Profile, Path: path, Side: s.kind}, v, err)
	}
}

// watchPrograms returns, by program, the runs for each connection and the
// nanoseconds of each run.
func (b *bencher) watchPrograms(ctx context.Context, s *side, plan objects.Plan, path string) (values, error) {
	t := traffic{name: report.Connect, port: tcpPort, measure: saturated(load.Connect)}
	before, err := readPrograms()
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	m, err := b.attempt(ctx, t, clientOf(s.Side, path), t.targets(s.Side, plan, path, plan.ClusterIP(plan.Services-1)))
	if err != nil {
		return nil, err
	}
	after, err := readPrograms()
	if err != nil {
		return nil, err
	}
	// The warm-up ran, too.
	connections := m.values[report.Rate] * min(time.Since(begin), b.warmUp+b.duration).Seconds()
	sums := make(map[string]program)
	for id, now := range after {
		if then, ok := before[id]; ok {
			sum := sums[now.name]
			sums[now.name] = program{now.name, sum.runs + now.runs - then.runs, sum.took + now.took - then.took}
		}
	}
	v := make(values)
	for name, sum := range sums {
		if perConnection := float64(sum.runs) / connections; perConnection > 0.01 {
			v[name+" runs"] = perConnection
			v[name+" ns"] = float64(sum.took.Nanoseconds()) / float64(sum.runs)
		}
	}

	return v, nil
}

// program has the statistics of a program since it was loaded.
type program struct {
	name string
	runs uint64
	took time.Duration
}

// readPrograms reads the statistics of Sluice's programs.
func readPrograms() (map[ebpf.ProgramID]program, error) {
	all := make(map[ebpf.ProgramID]program)
	for id := ebpf.ProgramID(0); ; {
		var err error
		if id, err = ebpf.ProgramGetNextID(id); errors.Is(err, unix.ENOENT) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("list of programs: %w", err)
		}
		p, err := ebpf.NewProgramFromID(id)
		if errors.Is(err, unix.ENOENT) { // it has gone
			continue
		} else if err != nil {
			return nil, fmt.Errorf("program %d: %w", id, err)
		}
		info, failed := p.Info()
		stats, err := p.Stats()
		if err = errors.Join(failed, err, p.Close()); err != nil {
			return nil, fmt.Errorf("program %d: %w", id, err)
		}
		if strings.HasPrefix(info.Name, "sluice_") {
			all[id] = program{info.Name, stats.RunCount, stats.Runtime}
		}
	}
}
