package main

import (
	"context"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/datapath"
)

func newAgent(where *places) *cobra.Command {
	var flags *agentFlags
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "agent",
		Short: "Program this node's Services, until stopped; what is programmed stays in force afterwards",
		Long: "Programs this node's Services, until it is stopped. What is programmed stays in force afterwards.\n\n" +
			"It takes kube-proxy's flags and, with --config, its configuration file.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if requested, raw := flags.version.requested(); requested {
				return printVersion(cmd, raw)
			}
			settings, err := flags.resolve()
			if err != nil {
				return err
			}

			return flags.run(cmd, where, settings, out)
		},
	}
	flags = newAgentFlags(cmd.Flags())
	cmd.Flags().StringVarP(&out.format, "output", "o", out.format, "with --dry-run: table, json or yaml")

	return cmd
}

// run does what the flags select: write the configuration, clean up, print what
// would be programmed, prepare the node, or run the agent.
func (f *agentFlags) run(cmd *cobra.Command, where *places, s *settings, out *output) error {
	log, err := newLog(&s.kubeProxy.Logging, os.Stdout, os.Stderr)
	if err != nil {
		return err
	}
	s.report(log)
	switch {
	case f.writeTo != "":
		return s.write(f.writeTo)
	case f.cleanup:
		return cleanUp(cmd, where)
	}
	cfg, err := f.agentConfig(where, s, log)
	if err != nil {
		return err
	}
	if f.dryRun {
		return dryRun(cmd, cfg, out)
	}
	setConntrack(s.kubeProxy, log)
	if f.initOnly {
		return agent.Prepare(cfg)
	}
	setOOMScore(*s.kubeProxy.OOMScoreAdj, log)
	logCgroup(cfg.Datapath.CgroupRoot, where.cgroupRoot != "", log)

	return runAgent(cmd.Context(), cfg, s)
}

// logCgroup logs which processes' sockets are translated, and which are not. It
// is a warning only if the agent had to choose a part of the machine itself,
// without --cgroup-root.
func logCgroup(root string, asked bool, log *slog.Logger) {
	cgroup, err := datapath.LookupCgroup(root)
	switch {
	case err != nil:
		log.Info("cannot find out which sockets are translated", "cgroupRoot", root, "error", err)
	case cgroup.WholeMachine:
		log.Info("sockets of every process are translated", "cgroupRoot", root)
	case asked:
		log.Info("sockets of processes in one cgroup are translated", "cgroupRoot", root, "notCovered", cgroup.NotCovered())
	default:
		log.Warn("no mount shows the root of cgroup2: sockets of processes in one cgroup are translated",
			"cgroupRoot", root, "relative", cgroup.Relative, "notCovered", cgroup.NotCovered())
	}
}

// runAgent runs the agent until ctx ends or the configuration file changes.
func runAgent(ctx context.Context, cfg agent.Config, s *settings) error {
	group, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	group.Go(func() error {
		defer stop()

		return agent.Run(ctx, cfg)
	})
	if s.file != nil {
		group.Go(func() error { return s.file.Follow(ctx) })
	}

	return group.Wait()
}

func dryRun(cmd *cobra.Command, cfg agent.Config, out *output) error {
	services, err := agent.DryRun(cmd.Context(), cfg)
	if err != nil {
		return err
	}

	return out.print(cmd.OutOrStdout(), services, func(t *table) { drawServices(t, services) })
}
