package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
)

// costPort is where servers listen that cost less than those of the episodes, in the pods of the
// victim. The last Service leads to them.
const costPort = 8081

// Cost is what connections take while all is well, at one side in all rounds.
type Cost struct {
	Side string `json:"side"`
	// P50 is that of connect, in microseconds, and CPU the processor's time for a connection in the
	// client's context, in which the kernel also does most of the handshake.
	P50 report.Spread `json:"p50"`
	CPU report.Spread `json:"cpu"`
	// P50ToOff and CPUToOff are the ratios to sluice-off in the same round.
	P50ToOff report.Spread `json:"p50ToOff,omitzero"`
	CPUToOff report.Spread `json:"cpuToOff,omitzero"`
}

// one client connects as fast as it can, in windows so short that the machine is the same for all
// sides of a round.
var costWork = load.Work{Kind: load.Connect, Clients: 1, WarmUp: 20 * time.Millisecond, Duration: 300 * time.Millisecond}

// costTries is how often a window is measured again in which the machine was too busy for a single
// connection.
const costTries = 10

// measureCost measures all sides in turn, so many times.
func measureCost(ctx context.Context, sides []*side, service, rounds int) ([]Cost, error) {
	for _, s := range sides {
		for _, pod := range s.victim().Pods {
			server, err := load.Serve(pod.Namespace, costPort)
			if err != nil {
				return nil, err
			}
			defer server.Close()
		}
	}
	work := costWork
	work.Targets = []netip.AddrPort{netip.AddrPortFrom(clusterIP(service), servicePort)}
	p50, cpu := make(map[string][]float64), make(map[string][]float64)
	for round := range rounds {
		for _, s := range inTurn(sides, round) {
			var before time.Duration
			var err error
			var result load.Result
			for try := 0; try < costTries && result.Succeeded == 0; try++ {
				if before, err = proxy.ReadCPU(s.cgroup); err != nil {
					return nil, err
				}
				if result, err = load.Run(ctx, s.node().Pods[0].Namespace, s.cgroup, work); err != nil {
					return nil, fmt.Errorf("cost at %s: %w", s.kind, err)
				}
			}
			if result.Succeeded == 0 {
				return nil, fmt.Errorf("cost at %s: no connection in %d windows: %s", s.kind, costTries, result.FirstError)
			}
			after, err := proxy.ReadCPU(s.cgroup)
			if err != nil {
				return nil, err
			}
			p50[s.kind] = append(p50[s.kind], result.Latencies.Quantile(0.5).Seconds()*1e6)
			cpu[s.kind] = append(cpu[s.kind], (after-before).Seconds()*1e6/float64(result.Succeeded))
		}
	}
	var costs []Cost
	for _, s := range sides {
		costs = append(costs, Cost{
			Side: s.kind, P50: report.SpreadOf(p50[s.kind]), CPU: report.SpreadOf(cpu[s.kind]),
			P50ToOff: report.SpreadOf(ratios(p50[s.kind], p50["sluice-off"])), CPUToOff: report.SpreadOf(ratios(cpu[s.kind], cpu["sluice-off"])),
		})
	}

	return costs, nil
}

// ratios are those of values to others of the same round, if there are others.
func ratios(values, to []float64) []float64 {
	var all []float64
	for i := range min(len(values), len(to)) {
		all = append(all, values[i]/to[i])
	}

	return all
}
