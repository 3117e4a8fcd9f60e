package main

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newFlows(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "flows [NAMESPACE/NAME]",
		Short: "List the flows that are translated at devices: client, original destination and backend",
		Long:  "List the flows that are translated at devices: client, original destination and backend.\nConnections that are translated at a socket, when they are opened, are not among them.",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			pinned, err := where.load()
			if err != nil {
				return err
			}
			defer pinned.Close()
			service := ""
			if len(args) == 1 {
				if service, err = namedService(pinned, args[0]); err != nil {
					return err
				}
			}
			flows, err := flow.List(pinned, service, maps.Now())
			if err != nil {
				return err
			}

			return printFlows(cmd.OutOrStdout(), out.format, flows)
		},
	}
	out.flag(cmd)

	return cmd
}

// namedService returns NAMESPACE/NAME of the Service in the maps with that name, see [status.ServiceNamed].
func namedService(pinned *maps.Pinned, name string) (string, error) {
	names, err := status.ServiceNames(pinned.Tables)
	if err != nil {
		return "", err
	}

	return status.ServiceNamed(names, name)
}

// rowsTogether is the number of rows whose columns are aligned together.
const rowsTogether = 10000

// printFlows encodes flow by flow, since there may be millions.
func printFlows(w io.Writer, format string, flows []flow.Flow) error {
	if len(flows) == 0 || format != "json" && format != "yaml" {
		return (&output{format}).print(w, flows, func(t *table) { drawFlows(t, flows) })
	}
	before, after := "", ""
	for i := range flows {
		var text []byte
		var err error
		if format == "yaml" {
			text, err = marshalYAML(flows[i : i+1])
		} else {
			before, after = ",\n  ", "\n]\n"
			if i == 0 {
				before = "[\n  "
			}
			text, err = json.MarshalIndent(flows[i], "  ", "  ")
			text = escapeJSON(text)
		}
		if err != nil {
			return fmt.Errorf("output: %w", err)
		}
		if _, err := fmt.Fprintf(w, "%s%s", before, text); err != nil {
			return err
		}
	}
	_, err := fmt.Fprint(w, after)

	return err
}

func drawFlows(t *table, flows []flow.Flow) {
	t.row("SERVICE", "PROTOCOL", "CLIENT", "DESTINATION", "BACKEND", "MASQUERADE", "STACK PORT", "STATE", "AGE", "IDLE")
	for i, f := range flows {
		masquerade, stackPort := "", ""
		if f.Masquerade.IsValid() {
			masquerade = f.Masquerade.String()
		}
		if f.StackPort != 0 {
			stackPort = fmt.Sprint(f.StackPort)
		}
		t.row(f.Service, f.Protocol, f.Client.String(), f.OriginalDst.String(), f.Backend.String(), masquerade, stackPort,
			string(f.State), seconds(f.AgeSeconds), seconds(f.IdleSeconds))
		if (i+1)%rowsTogether == 0 {
			t.flush()
		}
	}
}

func seconds(n int64) string { return (time.Duration(n) * time.Second).String() }

// drawFlowTables prints how full the flow tables are, if there are any.
func drawFlowTables(t *table, s flow.Status) {
	if s.Flows.Capacity == 0 {
		return
	}
	t.note(fmt.Sprintf("flows     %s, %d MiB", s.Flows, s.Flows.Bytes>>20))
	t.note(fmt.Sprintf("          half open: %s, %d MiB", s.HalfOpen, s.HalfOpen.Bytes>>20))
	if s.Emergency != "" {
		t.note("          EMERGENCY: " + s.Emergency)
	}
	if s.Flood != "" {
		t.note("          " + s.Flood)
	}
}
