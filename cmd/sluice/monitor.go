package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/monitor"
	"github.com/sluice-lb/sluice/pkg/pods"
)

// monitorFlags are the flags of `sluice monitor`.
type monitorFlags struct {
	filter   monitor.Filter
	ip       string
	podLogs  string
	since    time.Duration
	noFollow bool
	format   string
}

func newMonitor(where *places) *cobra.Command {
	var set monitorFlags
	cmd := &cobra.Command{
		Use:   "monitor",
		Short: "Print new connections with the backends that they get, and refusals with their reasons, as they happen",
		Long: "Print new connections with the backends that they get, refusals with their reasons, and backends that do not\n" +
			"answer and answer again, as they happen. Refusals are kept, so that --since can print those that happened\n" +
			"before: the last 64 of each reason, and of frequent ones, one each second. It works without an agent.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if set.noFollow && set.since == 0 {
				return errors.New("--no-follow: without --since there is nothing to print")
			}
			pinned, err := where.load()
			if err != nil {
				return err
			}
			defer pinned.Close()
			cgroups, err := where.cgroup()
			if err != nil {
				return err
			}
			known := pods.NewCache(pods.Config{CgroupRoot: cgroups, Logs: set.podLogs})
			if err := set.complete(pinned, known); err != nil {
				return err
			}
			cfg := monitor.Config{Maps: pinned, Filter: set.filter, Since: set.since, NoFollow: set.noFollow, Pods: known}
			if cfg.Print, err = monitorPrinter(cmd.OutOrStdout(), set.format); err != nil {
				return err
			}

			err = monitor.Run(cmd.Context(), cfg)
			if errors.Is(err, maps.ErrFull) {
				return fmt.Errorf("%d of `sluice monitor` run on this node already, and there can be no more: %w", maps.MaxListeners, err)
			}

			return err
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&set.filter.Service, "service", "", "only events of this Service, [NAMESPACE/]NAME")
	flags.StringVar(&set.filter.Pod, "pod", "", "only events with this pod, [NAMESPACE/]NAME or UID, as the client or the backend")
	flags.StringVar(&set.ip, "ip", "", "only events with this address, as the client, the destination or the backend")
	flags.StringSliceVar(&set.filter.Reasons, "reason", nil, "only events with one of these reasons, as in metrics: "+strings.Join(eventReasons(), ", "))
	flags.BoolVar(&set.filter.Refused, "refused", false, "only refusals")
	flags.DurationVar(&set.since, "since", 0, "first print the refusals that were kept, up to this long ago, like 10m")
	flags.BoolVar(&set.noFollow, "no-follow", false, "end after those of --since")
	addPodLogs(cmd, &set.podLogs)
	flags.StringVarP(&set.format, "output", "o", "table", "table, or json: an object per line")

	return cmd
}

// eventReasons returns the labels of the reasons that events can have.
func eventReasons() []string {
	var labels []string
	for _, r := range maps.Reasons() {
		if r == maps.ReasonTranslated || r.Refuses() && r != maps.ReasonRejectLimited {
			labels = append(labels, r.Label())
		}
	}

	return labels
}

// complete completes the filter. Errors name the flag, or the pod that this node does not have.
func (f *monitorFlags) complete(pinned *maps.Pinned, known *pods.Cache) (err error) {
	if f.filter.Service != "" {
		if f.filter.Service, err = namedService(pinned, f.filter.Service); err != nil {
			return fmt.Errorf("--service: %w", err)
		}
	}
	if f.filter.Pod != "" {
		if err := known.Check(f.filter.Pod); err != nil {
			return err
		}
	}
	if f.ip != "" {
		if f.filter.IP, err = netip.ParseAddr(f.ip); err != nil {
			return fmt.Errorf("--ip %q: not an IP address", f.ip)
		}
		f.filter.IP = f.filter.IP.Unmap()
	}
	for _, label := range f.filter.Reasons {
		if !slices.Contains(eventReasons(), label) {
			return fmt.Errorf("--reason %q: it is one of %s", label, strings.Join(eventReasons(), ", "))
		}
	}

	return nil
}

// monitorPrinter returns a function that prints an event at once.
func monitorPrinter(w io.Writer, format string) (func(monitor.Event) error, error) {
	switch format {
	case "json":
		return func(e monitor.Event) error {
			text, err := json.Marshal(e)
			if err == nil {
				_, err = fmt.Fprintf(w, "%s\n", escapeJSON(text))
			}

			return err
		}, nil
	case "table":
		_, err := fmt.Fprintln(w, monitor.Header())

		return func(e monitor.Event) error {
			_, err := fmt.Fprintln(printable{w}, e)

			return err
		}, err
	default:
		return nil, fmt.Errorf("--output %q: it is table or json", format)
	}
}
