package report

import "time"

// madeRun is a small run of made-up values: 3 rounds, two sizes of the cluster, and
// things that went wrong.
func madeRun() *Run {
	r := &Run{Environment: Environment{
		Machine:   Machine{Kernel: "6.12.0", CPU: "Imaginary 9000", Cores: 2, Memory: 8 << 30, Hypervisor: true, Go: "go1.26.8"},
		Versions:  map[string]string{"sluice": "sluice v0.5.0", "nftables": "kube-proxy v1.36.3, nftables v1.0.6"},
		Command:   "bin/sluice-bench -services 10,1000",
		Started:   time.Date(2026, 11, 21, 20, 0, 0, 0, time.UTC),
		Elapsed:   10*time.Minute + 400*time.Millisecond,
		Sides:     []string{Ref, Sluice, IPTables, NFTables},
		Services:  []int{10, 1000, 10_000},
		Endpoints: 2, Rounds: 3, Starts: 3,
		WarmUp: time.Second, Duration: 3 * time.Second, Clients: 16, Rate: 2000, Churn: 100, Changes: 50,
		Notes: []string{"Nothing of this ever happened."},
	}, Interrupted: true, Errors: []string{"kube-proxy (nftables): it left a table behind\nand a rule"}}
	r.addConnections(10, 1)
	r.addConnections(1000, 0.4)
	r.addAll(Sample{Services: 1000, Case: Bulk, Path: DirectRemote, Side: Ref, Metric: Throughput}, 20.1, 20, 19.8)
	r.addAll(Sample{Services: 1000, Case: Bulk, Path: ServiceRemote, Side: Sluice, Metric: Throughput}, 20, 20.05, 19.85)
	r.addAll(Sample{Services: 1000, Case: Bulk, Path: ServiceRemote, Side: IPTables, Metric: Throughput}, 18, 17.9)
	r.Gaps = []Gap{
		{Services: 1000, Case: Bulk, Side: IPTables, Round: 2, Why: "iperf3: unable to connect"},
		{Services: 1000, Case: Bulk, Path: ServiceRemote, Side: NFTables, Round: 0, Why: "no | route"},
	}
	r.addControlPlane()

	return r
}

// addConnections adds rates and latencies. Iptables has a part of the rate of ref
// at the last Service, and nftables is better than Sluice.
func (r *Run) addConnections(services int, iptables float64) {
	for _, one := range []struct {
		path, side string
		rate       float64
	}{
		{Direct, Ref, 40_000}, {Direct, Sluice, 39_600}, {Direct, IPTables, 36_000}, {Direct, NFTables, 38_000},
		{ServiceLast, Sluice, 39_200}, {ServiceLast, IPTables, 40_000 * iptables}, {ServiceLast, NFTables, 40_400},
	} {
		sample := Sample{Services: services, Case: Connect, Path: one.path, Side: one.side, Metric: Rate}
		r.addAll(sample, one.rate, one.rate*1.01, one.rate*0.985)
		sample.Metric = P50
		r.addAll(sample, 4e6/one.rate, 4e6/one.rate*0.99, 4e6/one.rate*1.02)
	}
}

func (r *Run) addControlPlane() {
	r.addAll(Sample{Services: 10, Case: ChangeQuiet, Side: Sluice, Metric: WriteP50}, 1.5, 1.6, 1.4)
	r.addAll(Sample{Services: 10, Case: ChangeQuiet, Side: IPTables, Metric: WriteP50}, 22, 24, 20)
	r.addAll(Sample{Services: 10, Case: ChangeQuiet, Side: Sluice, Metric: MapWrites}, 4, 4, 4)
	r.addAll(Sample{Services: 1000, Case: ChangeQuiet, Side: Sluice, Metric: WriteP50}, 2.5, 2.4, 2.6)
	r.addAll(Sample{Services: 1000, Case: ChangeQuiet, Side: IPTables, Metric: WriteP50}, 220, 210, 230)
	r.addAll(Sample{Services: 10, Case: Memory, Side: Sluice, Metric: RSS}, 41, 42, 40.5)
	r.addAll(Sample{Services: 10, Case: Memory, Side: NFTables, Metric: RSS}, 50, 51, 52)
}

// addAll adds a value for each round.
func (r *Run) addAll(sample Sample, values ...float64) {
	for round, value := range values {
		sample.Round, sample.Value = round, value
		r.Add(sample)
	}
}

// onceRun is one round, also of sides, cases, paths and metrics that are in no table.
func onceRun() *Run {
	r := &Run{Environment: Environment{Sides: []string{Ref, Sluice, IPVS}, Services: []int{1}, Rounds: 1, Starts: 1}}
	for _, side := range []string{Ref, Sluice, IPVS, "another"} {
		r.addAll(Sample{Services: 1, Case: Exchange, Path: Direct, Side: side, Metric: Rate}, float64(1000*len(side)))
		r.addAll(Sample{Services: 1, Case: "juggling", Path: "by hand", Side: side, Metric: "balls"}, float64(len(side)))
	}
	r.Gaps = []Gap{{Services: 1, Case: UDPNew, Why: "there is no UDP"}}

	return r
}
