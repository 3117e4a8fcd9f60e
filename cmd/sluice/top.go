package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/pkg/top"
)

func newTop(where *places) *cobra.Command {
	out := newOutput()
	var cfg top.Config
	var once bool
	cmd := &cobra.Command{
		Use:   "top [NAMESPACE/NAME]",
		Short: "Show live what Services do on this node: connections, refusals, bytes, retransmissions",
		Long: `Show live what Services do on this node: connections, refusals, bytes, retransmissions, or those of one
Service by backend. In a terminal, keys sort the table and open a Service; elsewhere the table is
printed again and again. With --once, or -o json or yaml, it is printed once, after one interval.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cfg.Interval < minInterval {
				return fmt.Errorf("--interval %v: it is %v or more", cfg.Interval, minInterval)
			}
			if !slices.Contains(top.Orders(), cfg.Order) {
				return fmt.Errorf("--sort %q: it is one of %s", cfg.Order, strings.Join(top.Orders(), ", "))
			}
			pinned, err := where.load()
			if err != nil {
				return err
			}
			if len(args) == 1 {
				cfg.Service, err = namedService(pinned, args[0])
			}
			if err = errors.Join(err, pinned.Close()); err != nil { // the reader opens them anew each time
				return err
			}
			reader, err := top.NewReader(where.bpfRoot)
			if err != nil {
				return err
			}
			defer reader.Close()
			first, err := reader.Read()
			if err != nil {
				return err
			}
			once := once || out.format != "table"
			if !once && isTerminal(cmd.InOrStdin()) && isTerminal(cmd.OutOrStdout()) {
				return top.Show(cmd.Context(), reader, first, cfg, cmd.InOrStdin(), cmd.OutOrStdout())
			}

			return printTop(cmd.Context(), reader, first, cfg, once, out, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.DurationVar(&cfg.Interval, "interval", 2*time.Second, "time between readings; longer if they take more than a tenth of it")
	f.StringVar(&cfg.Order, "sort", "service", "sort by "+strings.Join(top.Orders(), ", "))
	f.BoolVar(&cfg.All, "all", false, "also show Services without connections and refusals")
	f.BoolVar(&once, "once", false, "print the table once, and end")
	out.flag(cmd)

	return cmd
}

// minInterval is the shortest time between readings.
const minInterval = 100 * time.Millisecond

func isTerminal(stream any) bool {
	file, ok := stream.(*os.File)

	return ok && term.IsTerminal(int(file.Fd()))
}

// printTop prints a table after each interval, or once, until ctx ends.
func printTop(ctx context.Context, reader *top.Reader, before *top.Sample, cfg top.Config, once bool, out *output, w io.Writer) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(before.Pause(cfg.Interval)):
		}
		after, err := reader.Read()
		if err != nil {
			return err
		}
		table := top.Between(before, after, cfg.All || cfg.Service != "")
		if cfg.Service != "" {
			table.Services = slices.DeleteFunc(table.Services, func(s top.Service) bool { return s.Service != cfg.Service })
		}
		if err := table.Sort(cfg.Order); err != nil {
			return err
		}
		switch {
		case out.format != "table":
			return out.print(w, table, nil)
		case cfg.Service != "":
			err = table.WriteBackends(printable{w})
		default:
			err = table.Write(printable{w}, nil)
		}
		if err != nil || once {
			return err
		}
		fmt.Fprintln(w)
		before = after
	}
}
