// Heal measures what clients notice of backends that die, beside the real kube-proxy and before
// the control plane notices anything: failed connections, how long connecting takes, how soon no
// new connection goes to the dead, and what is passed over by mistake.
//
//	bin/sluice-bench-heal --help
//
// It does not measure what healthy connections cost (BenchmarkHealing in pkg/datapath does), and starts
// no control plane but an API server that no one writes to. All of it happens in network namespaces of its own. It must
// be root.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bench/load"
	"github.com/sluice-lb/sluice/bench/proxy"
	"github.com/sluice-lb/sluice/bench/report"
	"github.com/sluice-lb/sluice/test/cluster"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

func main() {
	lab.Main()
	load.Main()
	// The first signal ends the run and keeps what it has; a second one ends the program.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	context.AfterFunc(ctx, stop)
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "heal: %v\n", err)
		os.Exit(1)
	}
}

// The sides that there are. Those of Sluice are named after --heal of its agent.
var sides = []string{"nftables", "sluice-off", "sluice-eject", "sluice-resteer"}

// options are the flags of the command line.
type options struct {
	sides  []string
	only   string
	rounds int
	rate   int
	phases phases
	sluice string
	output string

	wanted *regexp.Regexp // of only
}

func command() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:           "heal",
		Short:         "measures what clients notice of backends that die, beside the real kube-proxy",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.validate(); err != nil {
				return err
			}

			return o.run(cmd.Context(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringSliceVar(&o.sides, "sides", sides, "what is measured: kube-proxy's nftables, and Sluice with each --heal")
	f.StringVar(&o.only, "only", "", "measure only what this regular expression finds: PATH/EPISODE, as pod-tcp/vanish")
	f.IntVar(&o.rounds, "rounds", 1, "how often each is measured, all sides in turn")
	f.IntVar(&o.rate, "rate", 1000, "new connections a second, all clients together")
	f.DurationVar(&o.phases.healthy, "healthy", time.Second, "before an episode")
	f.DurationVar(&o.phases.episode, "episode", 5*time.Second, "of an episode")
	f.DurationVar(&o.phases.after, "after", 4*time.Second, "after an episode")
	f.StringVar(&o.sluice, "sluice", "", "the binary to measure (built from this tree)")
	f.StringVar(&o.output, "output", "heal-report.md", "file for the report")

	return cmd
}

// validate returns an error that names the wrong flags.
func (o *options) validate() error {
	var errs []error
	for _, name := range o.sides {
		if !slices.Contains(sides, name) {
			errs = append(errs, fmt.Errorf("--sides: %q, must be of %q", name, sides))
		}
	}
	if o.rounds <= 0 {
		errs = append(errs, fmt.Errorf("--rounds: %d, must be positive", o.rounds))
	}
	if o.rate < clientPods {
		errs = append(errs, fmt.Errorf("--rate: %d, must be %d or more: one for each client", o.rate, clientPods))
	}
	if o.phases.healthy < 100*time.Millisecond || o.phases.episode <= 0 || o.phases.after <= 0 {
		errs = append(errs, fmt.Errorf("--healthy, --episode, --after: %+v, must be positive, and --healthy 100ms or more: clients have to start", o.phases))
	}
	wanted, err := regexp.Compile(o.only)
	if err != nil {
		errs = append(errs, fmt.Errorf("--only: %w", err))
	}
	o.wanted = wanted

	return errors.Join(append(errs, proxy.Missing(proxy.NFTables))...)
}

// run measures all that is wanted, and writes the report of what was measured before an error or
// an interruption.
func (o *options) run(ctx context.Context, progress io.Writer) (err error) {
	machine, err := report.ReadMachine()
	if err != nil {
		return err
	}
	r := Report{
		Machine: machine, Command: strings.Join(os.Args, " "), Started: time.Now(), Rate: o.rate,
		Phases: fmt.Sprintf("%v before, %v of episode, %v after", o.phases.healthy, o.phases.episode, o.phases.after),
	}
	logf := func(format string, args ...any) {
		fmt.Fprintf(progress, "%7v  %s\n", time.Since(r.Started).Round(time.Second), fmt.Sprintf(format, args...))
	}
	folder, err := os.MkdirTemp("", "sluice-heal-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	if o.sluice == "" {
		if o.sluice, err = sluice.Build(folder, "bench"); err != nil {
			return err
		}
	}
	logf("starting an API server, and a cluster for each of %s", strings.Join(o.sides, ", "))
	files := filepath.Join(folder, "api")
	if err := os.Mkdir(files, 0o700); err != nil {
		return err
	}
	api, err := cluster.New(ctx, cluster.Config{Directory: files})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, api.Close()) }()
	var all []*side
	for _, kind := range o.sides {
		s, err := newSide(kind, api)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.Close()) }()
		all = append(all, s)
	}
	type measurement struct {
		round int
		path
		episode
	}
	var wanted []measurement
	for round := range o.rounds {
		for _, p := range paths {
			for _, e := range episodes {
				if p.has(e) && o.wanted.MatchString(p.name+"/"+e.name) {
					wanted = append(wanted, measurement{round, p, e})
				}
			}
		}
	}
	if err := writeObjects(api, all[0], len(wanted)); err != nil {
		return err
	}
	for _, s := range all {
		logf("%s starts", s.kind)
		if err := s.start(ctx, api, o.sluice); err != nil {
			return fmt.Errorf("start of %s: %w", s.kind, err)
		}
	}
	for service, m := range wanted {
		logf("%d of %d: %s/%s", service+1, len(wanted), m.path.name, m.episode.name)
		for _, s := range report.InTurn(all, m.round) {
			if ctx.Err() != nil {
				break
			}
			result, err := s.measure(ctx, service, m.path, m.episode, o.rate, o.phases)
			if err != nil {
				r.Errors = append(r.Errors, err.Error())
				logf("error: %v", err)

				continue
			}
			result.Round = m.round
			r.Results = append(r.Results, result)
			logf("%s", result)
		}
	}
	r.Interrupted = ctx.Err() != nil
	r.Elapsed = time.Since(r.Started)
	err = r.write(o.output)
	if len(r.Errors) > 0 || r.Interrupted {
		err = errors.Join(err, errors.New("not all was measured: the report has what is missing"))
	}

	return err
}
