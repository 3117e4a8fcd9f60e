// Bench measures Sluice beside the real kube-proxy, and beside a node without
// either, in one run on this machine, and writes a report: text, JSON and plots.
//
//	bin/sluice-bench --help
//
// All of it happens in network namespaces of its own. It must be root.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/objects"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/test/lab"
)

func main() {
	lab.Main()
	load.Main()
	// The first signal ends the run and keeps what it has; a second one ends the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// options are the flags of the command line.
type options struct {
	services  []int
	endpoints int
	proxies   []string
	only      string

	rounds  int
	starts  int
	changes int
	updates int
	churn   int

	warmUp   time.Duration
	duration time.Duration
	// sustained is the duration of those cases that last.
	sustained time.Duration
	clients   int
	rate      int
	rest      time.Duration

	output string
	sluice string
	// baseline is another build, to measure this one against; empty: none.
	baseline string

	cases *regexp.Regexp // of only
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:           "bench",
		Short:         "measures Sluice beside the real kube-proxy, on this machine",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}

			return bench(cmd.Context(), &o, cmd.ErrOrStderr(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.IntSliceVar(&o.services, "services", []int{10, 1000, 10000}, "how many Services there are: one size after the other")
	f.IntVar(&o.endpoints, "endpoints", 2, "endpoints of each Service")
	f.StringSliceVar(&o.proxies, "proxies", []string{report.Sluice, report.IPTables, report.NFTables},
		"what is measured beside the node without a proxy: sluice, baseline (another build of it), and kube-proxy's iptables, iptables-legacy, nftables, ipvs")
	f.StringVar(&o.only, "only", "", "measure only the cases whose name this regular expression finds")
	f.IntVar(&o.rounds, "rounds", 5, "how often traffic is measured, all proxies in turn")
	f.IntVar(&o.starts, "starts", 1, "how often each proxy is started, and its control plane measured")
	f.IntVar(&o.changes, "changes", 50, "endpoint changes whose latency is measured, of each kind and start")
	f.IntVar(&o.updates, "updates", 1000, "endpoint changes whose CPU is measured, of each start")
	f.IntVar(&o.churn, "churn", 100, "endpoint changes a second, where there is churn")
	f.DurationVar(&o.warmUp, "warm-up", 100*time.Millisecond, "traffic before each measurement")
	f.DurationVar(&o.duration, "duration", 500*time.Millisecond, "of each measurement of traffic")
	f.DurationVar(&o.sustained, "sustained", 5*time.Second, "duration of the cases that last: so long that the node has to use ports again")
	f.IntVar(&o.clients, "clients", 16, "clients that dial at the same time")
	f.IntVar(&o.rate, "rate", 2000, "connections a second, where the rate is fixed")
	f.DurationVar(&o.rest, "rest", 5*time.Second, "how long after its start a proxy's memory is read")
	f.StringVar(&o.output, "output", "bench-report", "folder for report.txt, report.md, report.json.gz and the plots")
	f.StringVar(&o.sluice, "sluice", "", "the binary to measure (built from this tree)")
	f.StringVar(&o.baseline, "baseline", "", "another build of it, which --proxies calls baseline")

	return cmd
}

// validate returns an error that names the wrong flags.
func (o *options) validate() error {
	var errs []error
	positive := func(flag string, value int) {
		if value <= 0 {
			errs = append(errs, fmt.Errorf("--%s: %d, must be positive", flag, value))
		}
	}
	if o.endpoints < 2 {
		errs = append(errs, fmt.Errorf("--endpoints: %d, must be 2 or more: one on each node", o.endpoints))
	}
	positive("rounds", o.rounds)
	positive("starts", o.starts)
	positive("changes", o.changes)
	positive("updates", o.updates)
	positive("churn", o.churn)
	positive("clients", o.clients)
	positive("rate", o.rate)
	positive("duration", int(o.duration))
	positive("sustained", int(o.sustained))
	if o.warmUp < 0 || o.rest < 0 {
		errs = append(errs, fmt.Errorf("--warm-up, --rest: %v, %v, must not be negative", o.warmUp, o.rest))
	}
	slices.Sort(o.services) // Services are added, never taken away
	for _, n := range o.services {
		positive("services", n)
		errs = append(errs, name("services", objects.Plan{Services: n, Endpoints: o.endpoints}.Fits()))
	}
	if slices.Contains(o.proxies, string(proxy.Baseline)) != (o.baseline != "") {
		errs = append(errs, errors.New("--baseline: it goes with baseline in --proxies"))
	}
	for i, kind := range o.proxies {
		switch k := proxy.Kind(kind); {
		case !slices.Contains(proxy.Kinds, k):
			errs = append(errs, fmt.Errorf("--proxies: %q, must be of %q", kind, proxy.Kinds))
		case slices.Contains(o.proxies[:i], kind):
			errs = append(errs, fmt.Errorf("--proxies: %s is there twice", kind))
		default:
			errs = append(errs, name("proxies", proxy.Missing(k)))
		}
	}
	cases, err := regexp.Compile(o.only)
	errs = append(errs, name("only", err))
	o.cases = cases

	return errors.Join(errs...)
}

// name adds the flag to an error.
func name(flag string, err error) error {
	if err == nil {
		return nil
	}

	return fmt.Errorf("--%s: %w", flag, err)
}
