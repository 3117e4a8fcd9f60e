package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/explain"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newExplain(where *places) *cobra.Command {
	out := newOutput()
	var from, to, device, podLogs string
	cmd := &cobra.Command{
		Use:   "explain [--from POD|IP] --to ADDRESS:PORT[/udp]|SERVICE[:PORT]",
		Short: "Explain what a new connection gets, and why",
		Long: "Explain what a new connection gets, and why: which frontend it comes to, which endpoints it may get, and what may stop it.\n" +
			"It asks the programs that are attached, on the maps in force, and changes nothing. It needs no agent, but only an agent\n" +
			"knows why endpoints are not eligible. It must run in the node's network namespace.",
		Example: "  sluice explain --to shop/web:http\n  sluice explain --from 10.244.1.5 --to 10.96.0.10:53/udp\n  sluice explain --from 198.51.100.7 --to 192.168.50.1:30080",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
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
	if err := cmd.MarkFlagRequired("to"); err != nil {
		panic(err) // there is no such flag
	}
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
