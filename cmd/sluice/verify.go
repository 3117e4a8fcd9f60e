package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
)

var errDifferent = errors.New("the maps or hooks are not as they should be, see above")

func newVerify(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare the maps with what Services want, and check that the programs take effect",
		Long:  "Compare the maps with what Services want, and check that the programs take effect.\nThe exit code is 1 if anything differs.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := verify(cmd.Context(), where)
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

func verify(ctx context.Context, where *places) (verifyReport, error) {
	client := status.NewClient(where.socket)
	status, err := client.Status(ctx)
	if err != nil {
		return verifyReport{}, err
	}
	if !status.Synced {
		return verifyReport{}, errors.New("the agent waits for the first complete list of Services: there is nothing to compare with the maps yet")
	}
	pinned, err := maps.Load(status.BPFRoot)
	if err != nil {
		return verifyReport{}, err
	}
	defer pinned.Close()

	report := verifyReport{Hooks: len(status.Hooks)}
	report.Frontends, report.Differences, err = compareMaps(ctx, client, pinned.Tables)
	if err != nil {
		return verifyReport{}, err
	}
	if status.Unpinned != "" {
		report.Differences = append(report.Differences, status.Unpinned)
	}
	for _, hook := range status.Hooks {
		if hook.Problem != "" {
			report.Differences = append(report.Differences, fmt.Sprintf("hook %s: %s", hook.Name, hook.Problem))
		}
	}
	for _, device := range status.Devices {
		if device.Problem != "" {
			report.Differences = append(report.Differences, fmt.Sprintf("device %s: %s", device.Name, device.Problem))
		}
	}
	if err := datapath.Verify(ctx, status.CgroupRoot); err != nil {
		report.Differences = append(report.Differences, err.Error())
	}

	return report, nil
}

// compareMaps returns how many frontends it compared, and the differences that it
// found three times, a second apart: those of a change in progress disappear.
func compareMaps(ctx context.Context, client *status.Client, tables maps.Tables) (int, []string, error) {
	lasting := []string{}
	for pass := 1; ; pass++ {
		desired, err := client.Desired(ctx)
		if err != nil {
			return 0, nil, err
		}
		have, problems, err := status.Programmed(tables)
		if err != nil {
			return 0, nil, err
		}
		differences := append(problems, status.Compare(desired, have)...)
		if pass == 1 {
			lasting = append(lasting, differences...)
		}
		lasting = slices.DeleteFunc(lasting, func(d string) bool { return !slices.Contains(differences, d) })
		if len(lasting) == 0 || pass == 3 {
			return len(desired), lasting, nil
		}
		time.Sleep(time.Second)
	}
}

func (r verifyReport) draw(t *table) {
	for _, d := range r.Differences {
		t.note("- " + d)
	}
	t.note(fmt.Sprintf("%d frontends and %d hooks compared, %d differences", r.Frontends, r.Hooks, len(r.Differences)))
}

// newProbe returns the hidden command that [datapath.Verify] starts in the cgroup root.
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:    datapath.ProbeVerb,
		Hidden: true,
		Args:   cobra.NoArgs,
		Run:    func(*cobra.Command, []string) { os.Exit(datapath.ProbeMain()) },
	}
}
