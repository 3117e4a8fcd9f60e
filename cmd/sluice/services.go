package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newServices(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "services [NAMESPACE/NAME]",
		Short: "List Services with the addresses that lead to them, or show one with its backends",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			services, err := readServices(cmd, where, args)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return out.print(cmd.OutOrStdout(), services, func(t *table) { drawServices(t, services) })
			}

			return out.print(cmd.OutOrStdout(), services[0], func(t *table) { drawService(t, services[0]) })
		},
	}
	out.flag(cmd)

	return cmd
}

func newBackends(where *places) *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "backends [NAMESPACE/NAME]",
		Short: "List the endpoints of Services: those that get new connections, and why others do not",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			services, err := readServices(cmd, where, args)
			if err != nil {
				return err
			}
			backends := backendsOf(services)

			return out.print(cmd.OutOrStdout(), backends, func(t *table) { drawBackends(t, backends) })
		},
	}
	out.flag(cmd)

	return cmd
}

// readServices returns the agent's Services, or only the one that args name, see [status.ServiceNamed]. If no
// agent runs, or it does not answer, it reads the maps, which have no endpoints without traffic, and writes a note about that.
func readServices(cmd *cobra.Command, where *places, args []string) ([]status.Service, error) {
	client := status.NewClient(where.socket)
	services, err := []status.Service{{}}, error(nil)
	if len(args) == 0 {
		services, err = client.Services(cmd.Context())
	} else {
		services[0], err = client.Service(cmd.Context(), args[0])
	}
	if errors.Is(err, status.ErrNotRunning) || errors.Is(err, status.ErrHung) {
		fmt.Fprintf(cmd.ErrOrStderr(), "%v\nThese are the Services in the maps; endpoints without traffic are not in there.\n\n", err)
		pinned, errLoad := where.load()
		if errLoad != nil {
			return nil, errLoad
		}
		defer pinned.Close()
		services, err = status.ProgrammedServices(pinned.Tables)
		if err == nil && len(args) > 0 {
			services, err = status.OnlyNamed(services, args[0])
		}
	}
	if errors.As(err, new(status.NameError)) {
		err = fmt.Errorf("%w; headless ones and those of type ExternalName lead to no address of a Service", err)
	}

	return services, err
}

// backendsOf returns the backends of all ports of Services.
func backendsOf(services []status.Service) []status.Backend {
	backends := []status.Backend{}
	for _, svc := range services {
		for _, port := range svc.Ports {
			backends = append(backends, port.Backends...)
		}
	}

	return backends
}

func drawServices(t *table, services []status.Service) {
	t.row("SERVICE", "KIND", "ADDRESS", "PROTOCOL", "BACKENDS", "STATE")
	for _, svc := range services {
		drawn := false
		for _, port := range svc.Ports {
			for i, f := range port.Frontends {
				drawn = true
				if f.Scope != lb.Internal && i > 0 && port.Frontends[i-1].Address == f.Address {
					continue // drawn with the other scope
				}
				t.row(port.Name, f.Kind.String(), f.Address.String(), f.Protocol.String(),
					backendCount(port, f)+notes(port, f), serviceState(svc))
			}
		}
		if !drawn {
			t.row(svc.Name, svc.Type, "", "", "", serviceState(svc))
		}
	}
}

// notes returns in parentheses what is special about a frontend: its algorithm, unless that is the
// default, that sockets of pods are left alone, how healing is limited, and which of the backends are
// suspects.
func notes(port status.ServicePort, f status.Frontend) string {
	var notes []string
	if f.Algorithm != lb.Random.String() && len(f.Backends) > 0 {
		notes = append(notes, f.Algorithm)
	}
	if f.OptedOut {
		notes = append(notes, "not at sockets of pods")
	}
	if f.Healing != "" {
		notes = append(notes, "healing: "+f.Healing)
	}
	suspects := 0
	for _, b := range port.Backends {
		if b.Suspect != nil && slices.Contains(f.Backends, b.Address) {
			suspects++
		}
	}
	if suspects > 0 {
		notes = append(notes, fmt.Sprintf("%d suspect", suspects))
	}
	if len(notes) == 0 {
		return ""
	}

	return " (" + strings.Join(notes, ", ") + ")"
}

// backendCount returns how many backends an address has: one number, or one of each
// scope if traffic policies make them differ.
func backendCount(port status.ServicePort, f status.Frontend) string {
	counts := map[lb.Scope]string{}
	for _, other := range port.Frontends {
		if other.Address == f.Address && other.Protocol == f.Protocol {
			counts[other.Scope] = fmt.Sprint(len(other.Backends))
			if other.WhenEmpty != "" {
				counts[other.Scope] += " (" + other.WhenEmpty + ")"
			}
		}
	}
	internal, external := counts[lb.Internal], counts[lb.External]
	if internal == external || external == "" {
		return internal
	}
	if internal == "" {
		return external + " from outside"
	}

	return internal + ", " + external + " from outside"
}

func serviceState(svc status.Service) string {
	switch {
	case svc.Error != "":
		return svc.Error
	case len(svc.Problems) > 0:
		return fmt.Sprintf("ok, %d problems", len(svc.Problems))
	default:
		return "ok"
	}
}

func drawService(t *table, svc status.Service) {
	t.note(fmt.Sprintf("%s (%s): %s", svc.Name, svc.Type, serviceState(svc)))
	for _, p := range svc.Problems {
		t.note("  " + p.String())
	}
	t.note("")
	drawServices(t, []status.Service{svc})
	t.note("")
	drawBackends(t, backendsOf([]status.Service{svc}))
}

func drawBackends(t *table, backends []status.Backend) {
	t.row("SERVICE", "BACKEND", "PROTOCOL", "CONNECTIONS", "STATE", "NODE", "ZONE")
	for _, b := range backends {
		state := "active"
		if !b.Active {
			state = "inactive: " + b.Reason
		} else if b.Suspect != nil {
			state = b.Suspect.String()
		}
		t.row(b.Service, b.Address.String(), b.Protocol.String(), fmt.Sprint(b.Connections), state, b.Node, b.Zone)
	}
}
