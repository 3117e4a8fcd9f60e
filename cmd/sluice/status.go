package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newStatus(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the agent runs and its programs take effect, and what is wrong",
		Long:  "Show whether the agent runs and its programs take effect, and what is wrong.\nThe exit code is 1 if Services may not work as they should.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			status, err := readStatus(cmd.Context(), where)
			if err != nil {
				return err
			}
			if err := out.print(cmd.OutOrStdout(), status, func(t *table) { drawStatus(t, status) }); err != nil {
				return err
			}
			if !status.Well() {
				return errors.New("Services may not work as they should, see above")
			}

			return nil
		},
	}
	out.flag(cmd)

	return cmd
}

// readStatus returns the agent's status, or what the kernel has if no agent runs, or one does not answer.
func readStatus(ctx context.Context, where *places) (status.Status, error) {
	s, err := status.NewClient(where.socket).Status(ctx)
	hung := ""
	switch {
	case errors.Is(err, status.ErrHung):
		hung = err.Error()
	case !errors.Is(err, status.ErrNotRunning):
		return s, err
	}
	cgroupRoot, err := where.cgroup()
	if err != nil {
		return status.Status{}, err
	}

	s, err = status.KernelStatus(ctx, where.bpfRoot, cgroupRoot)
	s.Hung = hung

	return s, err
}

func drawStatus(t *table, s status.Status) {
	drawAgent(t, s)
	drawHooks(t, s)
	for _, missing := range s.Missing {
		t.note("kernel    " + missing)
	}
	switch {
	case !s.Running: // the kernel does not have it
	case s.ThroughStack != "":
		t.note("forwarding: stack, because " + s.ThroughStack)
	default:
		t.note("forwarding: what goes to backends on other nodes does not pass the network stack")
	}
	for _, limit := range s.Limits {
		t.note("not translated: " + limit)
	}
	if s.MasqueradePorts != "" {
		line := "masquerade: with the ports " + s.MasqueradePorts
		if s.PortsProblem != "" {
			line += "; " + s.PortsProblem
		}
		t.note(line)
	}
	if s.Files.Limit > 0 {
		t.note(fmt.Sprintf("files: %d open, of %d", s.Files.Open, s.Files.Limit))
	}
	drawFlowTables(t, s.Flows)
	drawDevices(t, s.Devices)
	t.note("")
	t.row("MAP", "ENTRIES", "CAPACITY")
	for _, m := range s.Maps {
		t.row(m.Name, fmt.Sprint(m.Entries), fmt.Sprint(m.Capacity))
	}
	t.note("")
	t.row("COUNT", "OUTCOME")
	for _, reason := range slices.Sorted(maps.Keys(s.Counts)) {
		if n := s.Counts[reason]; n > 0 {
			t.row(fmt.Sprint(n), reason)
		}
	}
	if trouble := s.Files.Trouble(); trouble != "" {
		t.note("problem: " + trouble)
	}
	for _, text := range s.Unread {
		t.note("not known: " + text)
	}
	for _, e := range s.Errors {
		t.note(fmt.Sprintf("error: Service %s: %s", e.Service, e.Error))
	}
	for _, p := range s.Problems {
		if p.Effect == lb.LeftOut {
			t.note("left out: " + p.String())
		} else {
			t.note("problem: " + p.String())
		}
	}
}

func drawAgent(t *table, s status.Status) {
	switch {
	case s.Hung != "":
		t.note("agent     " + s.Hung + ": what is programmed stays in force, changes are not followed")
	case !s.Running && s.NothingProgrammed():
		t.note("agent     not running, and nothing is programmed")
	case !s.Running:
		t.note("agent     not running: what is programmed stays in force, changes are not followed; " + status.WithoutAgent(s.LastRan, time.Now()))
	case !s.Synced:
		t.note(fmt.Sprintf("agent     %s, waiting for the first complete list of Services from %s", s.Version, s.Source))
	default:
		t.note(fmt.Sprintf("agent     %s, up %s, node %s, following %s", s.Version,
			time.Since(s.Started).Round(time.Second), s.Node, s.Source))
		if len(s.Silence) > 0 {
			t.note(heard(s))
		}
		t.note(fmt.Sprintf("services  %d", s.Services))
		if len(s.OptedOut) > 0 {
			t.note(fmt.Sprintf("opted out %d pods, whose sockets are left alone", len(s.OptedOut)))
		}
		for _, pod := range s.OptedOut {
			if pod.NoCgroup {
				t.note(fmt.Sprintf("          %s: no cgroup below %s has its UID; it has no processes, or they are translated", pod.Pod, s.CgroupRoot))
			}
		}
	}
	for _, text := range s.Ignored {
		t.note("ignored   " + text)
	}
	pins := "pins      " + s.BPFRoot
	if s.Unpinned != "" {
		pins += ", but " + s.Unpinned
	}
	t.note(pins)
}

// heard returns the line about when the watches were last heard from.
func heard(s status.Status) string {
	silent := s.Silent()
	if len(silent) == 0 {
		longest := slices.Max(slices.Collect(maps.Values(s.Silence)))

		return fmt.Sprintf("heard     all watches, %s ago or later", longest.Round(time.Second))
	}

	return "heard     but " + strings.Join(silent, "\n          ")
}

func drawHooks(t *table, s status.Status) {
	effective := "effective"
	if strings.HasPrefix(s.Effective, datapath.ErrNotEffective.Error()) {
		effective = "but NOT effective: " + s.Effective
	} else if unknown := cmp.Or(s.Effective, s.Untried); unknown != "" {
		effective = "but " + unknown
	}
	attached := 0
	for _, hook := range s.Hooks {
		if hook.Problem == "" {
			attached++
		}
	}
	t.note(fmt.Sprintf("hooks     %d of %d attached to %s, %s", attached, len(s.Hooks), s.CgroupRoot, effective))
	for _, other := range s.Others {
		t.note("          beside " + other.String())
	}
	if s.NotCovered != "" {
		t.note("          not covered: " + s.NotCovered)
	}
	for _, hook := range s.Hooks {
		if hook.Problem != "" {
			t.note(fmt.Sprintf("          %s: %s", hook.Name, hook.Problem))
		}
	}
}

func drawDevices(t *table, devices []datapath.DeviceState) {
	t.note("")
	t.row("DEVICE", "CLASS", "ATTACHED", "WHY")
	for _, d := range devices {
		why := d.Reason
		if len(d.Ahead) > 0 {
			why += "; runs after " + strings.Join(d.Ahead, ", ")
		}
		if d.Problem != "" {
			why += "; but " + d.Problem
		}
		why = strings.TrimPrefix(why, "; ")
		t.row(d.Name, d.Class, string(d.Attached), why)
	}
}
