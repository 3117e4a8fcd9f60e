package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newExplain(where *places) *cobra.Command {
	out := newOutput()
	var from, to, device, podLogs, file string
	deleted := false
	cmd := &cobra.Command{
		Use:   "explain [--from POD|IP] --to ADDRESS:PORT[/udp]|SERVICE[:PORT] | explain -f FILE",
		Short: "Explain what a new connection gets, and why, or what a change would make of Services",
		Long: "Explain what a new connection gets, and why: which frontend it comes to, which endpoints it may get, and what may stop it.\n" +
			"It asks the programs that are attached, on the maps in force, and changes nothing. It needs no agent, but only an agent\n" +
			"knows why endpoints are not eligible. It must run in the node's network namespace.\n\n" +
			"With -f it asks the agent what the Services, EndpointSlices or the Node of a file would change on this node: which frontends\n" +
			"come and go, and the odds of the endpoints. The exit code is 1 if a Service would have no endpoint, and 2 if that could not be found out.",
		Example: "  sluice explain --to shop/web:http\n  sluice explain --from 10.244.1.5 --to 10.96.0.10:53/udp\n  sluice explain --from 198.51.100.7 --to 192.168.50.1:30080\n  kubectl apply --dry-run=server -o yaml -f web.yaml | sluice explain -f -",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file != "" {
				return tryChange(cmd, where, out, file, deleted)
			}
			explanation, err := ask(cmd.Context(), where, podLogs, from, to, device)
			if err != nil {
				return err
			}

			return out.print(cmd.OutOrStdout(), explanation, func(t *table) { drawExplanation(t, explanation) })
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "the client: a Pod of this node, [NAMESPACE/]NAME or UID, or an address, also with a port (default: a process of this node)")
	cmd.Flags().StringVar(&to, "to", "", "the destination: ADDRESS:PORT or [NAMESPACE/]SERVICE[:PORT], with /udp or /sctp for other protocols than TCP; a Service may also be svc/NAME, or a name of DNS, as web.shop.svc")
	cmd.Flags().StringVar(&device, "device", "", "the client's packets arrive by this device, and no socket program has seen them (default: as --from suggests)")
	addPodLogs(cmd, &podLogs)
	cmd.Flags().StringVarP(&file, "filename", "f", "", "a manifest of Services, EndpointSlices or Nodes that the cluster may get, - for the standard input")
	cmd.Flags().BoolVar(&deleted, "deleted", false, "the cluster would have the objects of -f no more")
	cmd.MarkFlagsOneRequired("to", "filename")
	for _, flag := range []string{"from", "to", "device"} {
		cmd.MarkFlagsMutuallyExclusive("filename", flag)
	}
	cmd.MarkFlagsMutuallyExclusive("to", "deleted")
	out.flag(cmd)

	return cmd
}

// ask explains a connection that is given as in the flags.
func ask(ctx context.Context, where *places, podLogs, from, to, device string) (answer explain.Explanation, err error) {
	pinned, err := where.load()
	if err != nil {
		return answer, err
	}
	defer pinned.Close()
	cgroups, err := where.cgroup()
	if err != nil {
		return answer, err
	}
	explainer := explain.New(explain.Config{
		Maps: pinned, BPFRoot: where.bpfRoot, Agent: status.NewClient(where.socket),
		Pods: pods.Config{CgroupRoot: cgroups, Logs: podLogs},
	})
	defer func() { err = errors.Join(err, explainer.Close()) }()
	question, err := explainer.Ask(from, to, device)
	if err != nil {
		return answer, err
	}

	return explainer.Explain(ctx, question)
}

// readInput reads a file, or the standard input if it is called -.
func readInput(cmd *cobra.Command, file string) ([]byte, error) {
	if file == "-" {
		return io.ReadAll(cmd.InOrStdin())
	}

	return os.ReadFile(file)
}

// tryChange prints what a change would make of the Services of this node.
func tryChange(cmd *cobra.Command, where *places, out *output, file string, deleted bool) error {
	content, err := readInput(cmd, file)
	if err != nil {
		return notRun(err)
	}
	trial, err := status.NewClient(where.socket).Try(cmd.Context(), content, deleted)
	if err != nil {
		return notRun(err)
	}
	if err := out.print(cmd.OutOrStdout(), trial, func(t *table) { drawTrial(t, trial) }); err != nil {
		return err
	}
	var without []string
	for _, svc := range trial.Services {
		without = append(without, svc.Without...)
	}
	if len(without) > 0 {
		return fmt.Errorf("no endpoint would serve new connections to %s", status.NamesText(without))
	}

	return nil
}

func drawTrial(t *table, trial status.Trial) {
	for _, p := range trial.Problems {
		t.note(p.String())
	}
	if len(trial.Services) == 0 {
		t.note("nothing would change on this node")
	}
	for i, svc := range trial.Services {
		if i > 0 {
			t.note("")
		}
		t.note(fmt.Sprintf("Service %s: %s", svc.Name, svc.Outcome))
		for _, p := range svc.Problems {
			t.note(p.String())
		}
		for _, f := range svc.Frontends[:min(len(svc.Frontends), mostDrawn)] {
			t.note(fmt.Sprintf("%-13s%s %s %s: %s%s", "frontend", f.Service, f.Kind, f.Address, f.Outcome, contested(f)))
		}
		if more := len(svc.Frontends) - mostDrawn; more > 0 {
			t.note(fmt.Sprintf("%-13s%d more, which -o json has", "frontends", more))
		}
		if svc.HealthCheck != "" {
			t.note(fmt.Sprintf("%-13shealth check node port %s", "health", svc.HealthCheck))
		}
		for _, port := range svc.Without {
			t.note(fmt.Sprintf("%-13sno endpoint would serve %s: new connections would be refused", "endpoints", port))
		}
		if svc.Connections > 0 {
			t.note(fmt.Sprintf("%-13s%d of this node's clients are with endpoints that go", "connections", svc.Connections))
		}
		if len(svc.Endpoints) == 0 {
			continue
		}
		t.note("")
		t.row("SERVICE", "POLICY", "ENDPOINT", "PROTOCOL", "NOW", "THEN", "STATE", "CONNECTIONS", "NODE", "ZONE")
		for _, e := range svc.Endpoints {
			t.row(e.Service, e.Policy, e.Address.String(), e.Protocol.String(), percent(e.Now), percent(e.Then), e.State, fmt.Sprint(e.Connections), e.Node, e.Zone)
		}
	}
}

// mostDrawn is how many frontends of a Service a table has.
const mostDrawn = 20

// contested returns who has a frontend that comes, and what follows.
func contested(f status.TriedFrontend) string {
	switch {
	case f.Contested == "":
		return ""
	case f.Yields:
		return fmt.Sprintf(", and Service %s loses it", f.Contested)
	}

	return fmt.Sprintf(", but Service %s has it and keeps it", f.Contested)
}

func drawExplanation(t *table, e explain.Explanation) {
	t.note(e.Answer)
	t.note(fmt.Sprintf("The client gets %s (reason %s).\n", e.Gets, e.Reason))
	for _, s := range e.Steps {
		t.note(fmt.Sprintf("%-11s%s", s.Name, s.Text))
	}
	for _, text := range e.Beyond {
		t.note(fmt.Sprintf("%-11s%s", "beyond", text))
	}
	if len(e.NotLooked) > 0 {
		t.note("not looked at: " + strings.Join(e.NotLooked, "; "))
	}
	for _, text := range e.Missing {
		t.note(fmt.Sprintf("%-11s%s", "missing", text))
	}
	if len(e.Endpoints) == 0 {
		return
	}
	t.note("")
	t.row("ENDPOINT", "ODDS", "STATE", "CONNECTIONS", "NODE", "ZONE", "SEES", "WAY")
	for _, endpoint := range e.Endpoints {
		state := endpoint.Reason
		if endpoint.Eligible {
			state = strings.TrimSuffix("eligible, "+endpoint.Reason, ", ")
		}
		if endpoint.Suspect != nil {
			state += ", " + endpoint.Suspect.String()
		}
		t.row(endpoint.Address.String(), percent(endpoint.Odds), state, fmt.Sprint(endpoint.Connections), endpoint.Node, endpoint.Zone, endpoint.Client, endpoint.Way)
	}
}

// percent returns a probability in percent, empty if it is 0.
func percent(odds float64) string {
	switch {
	case odds == 0:
		return ""
	case odds < 0.01:
		return "< 1 %"
	}

	return fmt.Sprintf("%.0f %%", odds*100)
}
