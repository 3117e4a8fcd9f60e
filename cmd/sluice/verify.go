package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/datapath"
)

var errDifferent = errors.New("what is programmed is not what should be, see above")

func newVerify(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare what Services say with what is in the maps, and check that the programs take effect",
		Long:  "Compare what Services say with what is in the maps, and check that the programs take effect.\nThe exit code is 1 if anything differs.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := verify(cmd, where)
			if err != nil {
				return err
			}
			if err := out.print(cmd.OutOrStdout(), report, func(t *table) { report.draw(t) }); err != nil {
				return err
			}
			if len(report.Differences) > 0 {
				return errDifferent
			}

			return nil
		},
	}
	out.flag(cmd)

	return cmd
}

type verifyReport struct {
	Frontends   int      `json:"frontends"`
	Hooks       int      `json:"hooks"`
	Differences []string `json:"differences"`
}

func verify(cmd *cobra.Command, where *places) (verifyReport, error) {
	cgroupRoot, err := where.cgroup()
	if err != nil {
		return verifyReport{}, err
	}
	desired, err := agent.NewClient(where.socket).Desired(cmd.Context())
	if err != nil {
		return verifyReport{}, err
	}
	pinned, err := maps.Load(where.bpfRoot)
	if err != nil {
		return verifyReport{}, err
	}
	defer pinned.Close()
	have, problems, err := agent.Programmed(pinned.Tables)
	if err != nil {
		return verifyReport{}, err
	}
	hooks, err := datapath.Hooks(where.bpfRoot, cgroupRoot)
	if err != nil {
		return verifyReport{}, err
	}

	report := verifyReport{Frontends: len(desired), Hooks: len(hooks), Differences: []string{}}
	report.Differences = append(report.Differences, problems...)
	report.Differences = append(report.Differences, agent.Compare(desired, have)...)
	for _, hook := range hooks {
		if hook.Problem != "" {
			report.Differences = append(report.Differences, fmt.Sprintf("hook %s: %s", hook.Name, hook.Problem))
		}
	}
	if err := datapath.Verify(cmd.Context(), cgroupRoot); err != nil {
		report.Differences = append(report.Differences, err.Error())
	}

	return report, nil
}

func (r verifyReport) draw(t *table) {
	for _, d := range r.Differences {
		t.note("- " + d)
	}
	t.note(fmt.Sprintf("%d frontends and %d hooks compared, %d differences", r.Frontends, r.Hooks, len(r.Differences)))
}
