package main

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/doctor"
	"github.com/sluice-lb/sluice/pkg/node"
)

// errSick makes `sluice doctor` exit with code 1.
var errSick = errors.New("there are problems, see above")

// exitError is an error with an exit code of its own.
type exitError struct {
	error
	code int
}

func (e exitError) Unwrap() error { return e.error }

// exitCode returns the exit code for an error of a command.
func exitCode(err error) int {
	var with exitError
	if errors.As(err, &with) {
		return with.code
	}

	return 1
}

// notRun is the error of a doctor that could not look at the node, or not at all of it.
func notRun(err error) error { return exitError{err, 2} }

// Of the agent's flags, the doctor does not take those that make the agent do something else than
// run, and shows in its help those that change what it looks at.
var (
	otherActs   = []string{"cleanup", "init-only", "write-config-to", "dry-run", "version"}
	doctorFlags = []string{
		"config", "kubeconfig", "master", "devices", "exclude-devices", "device-attach", "forwarding", "flow-table-memory",
	}
)

func newDoctor(where *places) *cobra.Command {
	out := newOutput()
	set := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	flags := newAgentFlags(set)
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find out whether Sluice can run on this node, and what stands in its way",
		Long: "Find out whether Sluice can run on this node, and what stands in its way. It needs no agent, and changes nothing.\n\n" +
			"It accepts the flags of 'sluice agent', so that it looks at what the agent would use; those that matter are below.\n" +
			"The exit code is 0 if all is well or there are only warnings, 1 if there is a problem, and 2 if there is none as far as\n" +
			"it could look, which was not everywhere.",
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return notRun(err)
			}

			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn}))
			cfg, err := flags.doctorConfig(where, log)
			if err != nil {
				return notRun(err)
			}
			report := doctor.Diagnose(doctor.Observe(cmd.Context(), cfg))
			if err := out.print(cmd.OutOrStdout(), report, func(t *table) { drawReport(t, report) }); err != nil {
				return notRun(err)
			}
			if report.Problems > 0 {
				return errSick
			}
			if report.Unseen > 0 {
				return notRun(fmt.Errorf("%d checks could not be made, see above", report.Unseen))
			}

			return nil
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return notRun(err) })
	cmd.Flags().SetNormalizeFunc(set.GetNormalizeFunc())
	set.VisitAll(func(flag *pflag.Flag) {
		if !slices.Contains(otherActs, flag.Name) {
			flag.Hidden = !slices.Contains(doctorFlags, flag.Name)
			cmd.Flags().AddFlag(flag)
		}
	})
	out.flag(cmd)

	return cmd
}

// doctorConfig returns what the agent would use, with these flags.
func (f *agentFlags) doctorConfig(where *places, log *slog.Logger) (doctor.Config, error) {
	s, err := f.resolve()
	if err != nil {
		return doctor.Config{}, err
	}
	s.report(log)
	if err := f.validate(s); err != nil {
		return doctor.Config{}, err
	}
	var cfg agent.Config
	if err := f.setDevices(&cfg); err != nil {
		return doctor.Config{}, err
	}
	if err := f.setMapSizes(&cfg, s.kubeProxy); err != nil {
		return doctor.Config{}, err
	}
	local, err := localDetector(s.kubeProxy)
	if err != nil {
		return doctor.Config{}, err
	}
	if err := s.apply(&cfg); err != nil {
		return doctor.Config{}, err
	}
	wanted := doctor.Config{
		Model: node.ModelConfig{
			NodeName: cfg.NodeName, NodePortAddresses: cfg.NodePortAddresses, NodeIP: cfg.NodeIP, Devices: local.Rules(cfg.Devices), Local: local,
		},
		CgroupRoot: where.cgroupRoot, BPFRoot: where.bpfRoot, Socket: where.socket,
		Attachment: cfg.Datapath.Attachment, ThroughStack: cfg.ThroughStack, FlowMemory: cfg.FlowMemory,
	}
	if f.wanted.Manifests != "" {
		return wanted, nil
	}
	server, err := restConfig(s.kubeProxy.ClientConnection, f.master)
	if errors.Is(err, rest.ErrNotInCluster) {
		return wanted, nil
	}
	if err == nil {
		wanted.APIServer = server.Host
		wanted.Client, err = rest.HTTPClientFor(server)
	}
	wanted.ClientErr = err // a finding, beside all others

	return wanted, nil
}

func drawReport(t *table, r doctor.Report) {
	for _, f := range r.Findings {
		t.note(fmt.Sprintf("%-8s  %-18s  %s", f.State, f.Check, f.Seen))
		if f.Remedy != "" {
			t.note(fmt.Sprintf("%30s%s\n%30s%s", "", f.Remedy, "", f.Link))
		}
	}
	t.note(fmt.Sprintf("\nproblems: %d, warnings: %d", r.Problems, r.Warnings))
}
