package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	componentconfig "k8s.io/component-base/config/v1alpha1"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kubeproxy"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/node"
	"github.com/sluice-lb/sluice/pkg/status"
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
				if raw {
					out.format = "json"
				}

				return out.printVersion(cmd)
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
// would be programmed, prepare the node, or run the agent until the command's context ends
// or the configuration file changes.
func (f *agentFlags) run(cmd *cobra.Command, where *places, s *settings, out *output) error {
	// When the reader of the log is gone, writing fails, and the agent goes on.
	signal.Ignore(unix.SIGPIPE)
	var log *slog.Logger
	var lost atomic.Uint64
	logLost := func(lines uint64) {
		log.Warn("lines of the log are lost, because they were not read in time", "sinceTheStart", lines)
	}
	stdout, stderr := newLogWriter(os.Stdout, &lost, logLost), newLogWriter(os.Stderr, &lost, logLost)
	defer stdout.flush()
	defer stderr.flush()
	log, err := newLog(&s.kubeProxy.Logging, stdout, stderr)
	if err != nil {
		return err
	}
	s.report(log)
	switch {
	case f.writeTo != "":
		return s.write(f.writeTo)
	case f.cleanup:
		return cleanUp(cmd, where, defaultDrain)
	}
	cfg, err := f.agentConfig(where, s, log)
	if err != nil {
		return err
	}
	cfg.LogLost = lost.Load
	if f.dryRun {
		services, problems, err := agent.DryRun(cmd.Context(), cfg)
		if err != nil {
			return notRun(err)
		}
		if err := out.print(cmd.OutOrStdout(), services, func(t *table) { drawServices(t, services) }); err != nil {
			return err
		}

		return dryRunError(services, problems)
	}
	setConntrack(s.kubeProxy, log)
	if f.initOnly {
		return datapath.Prepare(cfg.Datapath)
	}
	setOOMScore(*s.kubeProxy.OOMScoreAdj, log)
	logCgroup(cfg.Datapath.CgroupRoot, where.cgroupRoot != "", log)

	group, ctx := errgroup.WithContext(cmd.Context())
	ctx, stop := context.WithCancel(ctx)
	group.Go(func() error {
		defer stop()

		return agent.Run(ctx, cfg)
	})
	group.Go(func() error {
		watchKeeper(ctx, log)

		return nil
	})
	if s.file != nil {
		group.Go(func() error { return s.file.Follow(ctx) })
	}

	return group.Wait()
}

// keeperRetry is the pause before a watch that has failed begins again.
const keeperRetry = time.Minute

// watchKeeper is [kubeproxy.WatchKeeper] that begins again after an error, until ctx ends. Without it Services are
// translated all the same.
func watchKeeper(ctx context.Context, log *slog.Logger) {
	for {
		err := kubeproxy.WatchKeeper(ctx, log)
		if err == nil {
			return
		}
		log.Error("the table that keeps connections of kube-proxy's rules alive is not watched; trying again",
			"error", err, "in", keeperRetry)
		select {
		case <-ctx.Done():
			return
		case <-time.After(keeperRetry):
		}
	}
}

// dryRunError returns the error of a dry run, whose log has the problems: with exit code 2 if something could not be read, and
// 1 if a part of an object is not in force.
func dryRunError(services []status.Service, problems []lb.Problem) error {
	unread, left := 0, 0
	for _, p := range problems {
		if p.Effect == lb.LeftOut {
			left++
		} else {
			unread++
		}
	}
	for _, svc := range services {
		if svc.Error != "" {
			left++
		}
	}
	switch {
	case unread > 0:
		return notRun(fmt.Errorf("%d mistakes in manifests, of which nothing or an earlier version would be in force; see above", unread))
	case left > 0:
		return fmt.Errorf("%d parts of objects would not be in force; see above", left)
	}

	return nil
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

// setConntrack sets the sysctls of the kernel's conntrack as kube-proxy would.
// Sluice does not use conntrack, other programs on the node may: so a failure is
// logged, and the agent goes on.
func setConntrack(kp *config.KubeProxy, log *slog.Logger) {
	ct := kp.Conntrack
	set, err := node.Conntrack{
		MaxPerCore: int(*ct.MaxPerCore), Min: int(*ct.Min),
		TCPEstablished: ct.TCPEstablishedTimeout.Duration,
		TCPCloseWait:   ct.TCPCloseWaitTimeout.Duration,
		TCPBeLiberal:   ct.TCPBeLiberal,
		UDPUnanswered:  ct.UDPTimeout.Duration,
		UDPAnswered:    ct.UDPStreamTimeout.Duration,
	}.Set()
	if len(set) > 0 {
		log.Info("conntrack sysctls are set", "sysctls", set)
	}
	switch {
	case errors.Is(err, node.ErrNoConntrack):
		log.Info("conntrack sysctls are not set", "reason", err)
	case err != nil:
		log.Warn("some conntrack sysctls cannot be set; Sluice does not need them", "error", err)
	}
}

// kubeletOOMScore is the oom_score_adj that the kubelet gives pods with the
// priority class system-node-critical.
const kubeletOOMScore = -997

// setOOMScore sets this process' oom_score_adj. A score lower than the container
// runtime's takes SYS_RESOURCE, which the DaemonSet does not request: the score that
// the kubelet has set is low enough, and is logged without a warning.
func setOOMScore(score int32, log *slog.Logger) {
	const file = "/proc/self/oom_score_adj"
	err := os.WriteFile(file, []byte(strconv.Itoa(int(score))), 0)
	if err == nil {
		return
	}
	text, _ := os.ReadFile(file) // of the two errors, the first one is logged
	have, unknown := strconv.Atoi(strings.TrimSpace(string(text)))
	level := slog.LevelWarn
	if unknown == nil && isLowEnough(have, int(score)) {
		level = slog.LevelInfo
	}
	log.Log(context.Background(), level, "oom_score_adj stays as it is", "oomScoreAdj", have, "configured", score, "error", err)
}

// isLowEnough reports whether a score protects this process at least as well as the
// configured one, or as the kubelet's.
func isLowEnough(have, configured int) bool { return have <= max(kubeletOOMScore, configured) }

// restConfig returns how to reach the API server. Without a kubeconfig and --master that is the ClusterIP of the
// `kubernetes` Service, which does not work before Sluice does: a node without another proxy needs one of the two.
func restConfig(connection componentconfig.ClientConnectionConfiguration, master string) (*rest.Config, error) {
	var cfg *rest.Config
	var err error
	if connection.Kubeconfig == "" && master == "" {
		cfg, err = rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("API server: %w; give --kubeconfig, --master or --manifests", err)
		}
	} else {
		cfg, err = clientcmd.BuildConfigFromFlags(master, connection.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("kubeconfig %q, --master %q: %w", connection.Kubeconfig, master, err)
		}
	}
	cfg.ContentType, cfg.AcceptContentTypes = connection.ContentType, connection.AcceptContentTypes
	cfg.QPS, cfg.Burst = connection.QPS, int(connection.Burst)
	cfg.UserAgent = "sluice/" + version

	return cfg, nil
}
