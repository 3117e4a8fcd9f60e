package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/kubeproxy"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newVerify(where *places) *cobra.Command {
	out := newOutput()
	against := ""
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare the maps with what Services want, or with kube-proxy's rules, and check that the programs take effect",
		Long:  "Compare the maps with what Services want, and check that the programs take effect. With --against kube-proxy,\ncompare the maps with kube-proxy's rules in the kernel, Service by Service.\nThe exit code is 1 if anything differs.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch against {
			case "":
			case "kube-proxy":
				return verifyAgainst(cmd, where, out)
			default:
				return fmt.Errorf("--against %q: it is kube-proxy", against)
			}
			report, err := verify(cmd.Context(), where)
			if err != nil {
				return err
			}
			if err := out.print(cmd.OutOrStdout(), report, report.draw); err != nil {
				return err
			}
			if len(report.Differences) > 0 {
				return errors.New("the maps or hooks are not as they should be, see above")
			}

			return nil
		},
	}
	out.flag(cmd)
	cmd.Flags().StringVar(&against, "against", "", "compare with the rules of another proxy: kube-proxy")

	return cmd
}

type verifyReport struct {
	Frontends   int      `json:"frontends"`
	Hooks       int      `json:"hooks"`
	Differences []string `json:"differences"`
	// Untried is why it is unknown whether the programs take effect, although no trial has failed;
	// empty if one was made.
	Untried string `json:"untried,omitempty"`
}

func verify(ctx context.Context, where *places) (verifyReport, error) {
	client := status.NewClient(where.socket)
	state, err := client.Status(ctx)
	if err != nil {
		return verifyReport{}, err
	}
	if !state.Synced {
		return verifyReport{}, errors.New("the agent waits for the first complete list of Services: there is nothing to compare with the maps yet")
	}
	pinned, err := maps.Load(state.BPFRoot)
	if err != nil {
		return verifyReport{}, err
	}
	defer pinned.Close()

	report := verifyReport{Hooks: len(state.Hooks)}
	report.Differences, err = lasting(func() ([]string, error) {
		desired, err := client.Desired(ctx)
		if err != nil {
			return nil, err
		}
		report.Frontends = len(desired)
		have, problems, err := status.Programmed(pinned.Tables)

		return append(problems, status.Compare(desired, have)...), err
	})
	if err != nil {
		return verifyReport{}, err
	}
	report.Differences = append(report.Differences, state.AttachTroubles()...)
	report.setTrial(datapath.Verify(ctx, state.BPFRoot, state.CgroupRoot))

	return report, nil
}

// setTrial adds the outcome of a trial of the hooks. One that was too slow has shown nothing.
func (r *verifyReport) setTrial(err error) {
	switch {
	case errors.Is(err, datapath.ErrSlow):
		r.Untried = err.Error()
	case err != nil:
		r.Differences = append(r.Differences, err.Error())
	}
}

// lasting returns the differences that compare finds three times, a second apart: those of a change in
// progress disappear.
func lasting[T comparable](compare func() ([]T, error)) ([]T, error) {
	var all []T
	for pass := 1; ; pass++ {
		found, err := compare()
		if err != nil {
			return nil, err
		}
		if pass == 1 {
			all = append([]T{}, found...)
		}
		again := make(map[T]bool, len(found))
		for _, d := range found {
			again[d] = true
		}
		all = slices.DeleteFunc(all, func(d T) bool { return !again[d] })
		if len(all) == 0 || pass == 3 {
			return all, nil
		}
		time.Sleep(time.Second)
	}
}

func (r verifyReport) draw(t *table) {
	for _, d := range r.Differences {
		t.note("- " + d)
	}
	if r.Untried != "" {
		t.note(r.Untried)
	}
	t.note(fmt.Sprintf("%d frontends and %d hooks compared, %d differences", r.Frontends, r.Hooks, len(r.Differences)))
}

type againstReport struct {
	Mode        kubeproxy.Mode         `json:"mode"`
	Services    int                    `json:"services"`
	Frontends   int                    `json:"frontends"`
	Differences []kubeproxy.Difference `json:"differences"`
}

// verifyAgainst compares kube-proxy's rules with the maps. Either may be behind the other after a change.
func verifyAgainst(cmd *cobra.Command, where *places, out *output) error {
	pinned, err := where.load()
	if err != nil {
		return err
	}
	defer pinned.Close()
	var report againstReport
	report.Differences, err = lasting(func() ([]kubeproxy.Difference, error) {
		rules, err := kubeproxy.Read()
		if err != nil {
			return nil, err
		}
		services := make(map[string]bool)
		for _, f := range rules.Frontends {
			name, _, _ := strings.Cut(f.Service, ":")
			services[name] = true
		}
		report.Mode, report.Services, report.Frontends = rules.Mode, len(services), len(rules.Frontends)

		return compareRules(rules, pinned.Tables)
	})
	if err != nil {
		return err
	}
	if err := out.print(cmd.OutOrStdout(), report, report.draw); err != nil {
		return err
	}
	if len(report.Differences) > 0 {
		return errors.New("kube-proxy's rules and the maps differ, see above")
	}

	return nil
}

func compareRules(rules kubeproxy.Rules, tables maps.Tables) ([]kubeproxy.Difference, error) {
	frontends, _, err := status.Programmed(tables)
	if err != nil {
		return nil, err
	}
	frontends = slices.DeleteFunc(frontends, func(f status.Frontend) bool { return f.Address.Addr() == datapath.ProbeAddr })
	var all, nodePorts []netip.Addr // of this node, without loopback: iptables mode has rules for it, nftables mode has none
	for e, err := range tables.Addrs.All() {
		if err != nil {
			return nil, err
		}
		if e.Value.Flags&maps.AddrNode != 0 && !e.Key.IP().IsLoopback() {
			all = append(all, e.Key.IP())
		}
		if e.Value.Flags&maps.AddrNodePort != 0 {
			nodePorts = append(nodePorts, e.Key.IP())
		}
	}

	return append(rules.Compare(frontends), rules.CompareNodePorts(nodePorts, all)...), nil
}

func (r againstReport) draw(t *table) {
	if len(r.Differences) > 0 {
		t.row("SERVICE", "FRONTEND", "FIELD", "KUBE-PROXY", "SLUICE")
	}
	for _, d := range r.Differences {
		t.row(d.Service, d.Frontend, d.Field, d.KubeProxy, d.Sluice)
	}
	t.note(fmt.Sprintf("kube-proxy in mode %s: %d Services with %d frontends compared, %d differences", r.Mode, r.Services, r.Frontends, len(r.Differences)))
}

// newProbe returns the hidden command that [datapath.Verify] starts in the cgroup root.
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:    datapath.ProbeVerb + " PORT",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		Run:    func(_ *cobra.Command, args []string) { os.Exit(datapath.ProbeMain(args[0])) },
	}
}
