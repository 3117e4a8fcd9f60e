package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/connections"
	"github.com/sluice-lb/sluice/pkg/pods"
)

func newConnections(where *places) *cobra.Command {
	out := newOutput()
	var filter connections.Filter
	var order, podLogs string
	ends, yes := false, false
	cmd := &cobra.Command{
		Use:   "connections [NAMESPACE/NAME]",
		Short: "List the connections that were translated at a socket of this node, with their pod and process, or end some",
		Long: `List the TCP and UDP sockets of this node, in all network namespaces, that were translated when they connected
or sent: the pod and the process that have each open, Service and backend, and what the kernel counts of it.
What devices translate for clients elsewhere is listed by "sluice flows".

With --kill, the connections that are listed are ended, after a question: their processes get ECONNABORTED, and
connect again if they are made to.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				filter.Service = args[0]
			}
			if err := filter.Validate(); err != nil {
				return fmt.Errorf("--%w", err)
			}
			if !slices.Contains(connections.Orders(), order) {
				return fmt.Errorf("--sort %q: it is one of %s", order, strings.Join(connections.Orders(), ", "))
			}
			if ends && filter == (connections.Filter{}) {
				return errors.New("--kill: name a Service, or use --pod, --backend, --client, --state or --cookie, or all connections of the node would end")
			}
			if ends && filter.Pod != "" && !strings.Contains(filter.Pod, "/") && !pods.IsUID(filter.Pod) {
				return fmt.Errorf("--kill: several namespaces may have a pod %s: --pod NAMESPACE/NAME", filter.Pod)
			}
			pinned, err := where.load()
			if err != nil {
				return err
			}
			defer pinned.Close()
			if filter.Service != "" {
				if filter.Service, err = namedService(pinned, filter.Service); err != nil {
					return err
				}
			}
			cgroupRoot, err := where.cgroup()
			if err != nil {
				return err
			}
			all, err := connections.List(pinned, pods.Config{CgroupRoot: cgroupRoot, Logs: podLogs}, filter)
			if err != nil {
				return err
			}
			connections.Sort(all, order)
			if err := out.print(cmd.OutOrStdout(), all, func(t *table) { drawConnections(t, all) }); err != nil {
				return err
			}
			if ends {
				return kill(all, yes, cmd.InOrStdin(), cmd.ErrOrStderr())
			}

			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&filter.Service, "service", "", "only of this Service, [NAMESPACE/]NAME")
	f.StringVar(&filter.Pod, "pod", "", "only of this pod: [NAMESPACE/]NAME or UID")
	f.StringVar(&filter.Backend, "backend", "", "only to this backend: ADDRESS or ADDRESS:PORT")
	f.StringVar(&filter.Client, "client", "", "only from this address of a socket: ADDRESS or ADDRESS:PORT")
	f.StringVar(&filter.State, "state", "", "only in this state: "+strings.Join(connections.States(), ", "))
	f.Uint64Var(&filter.Cookie, "cookie", 0, "only of the socket with this cookie, which is the last column")
	f.StringVar(&order, "sort", "service", "sort by "+strings.Join(connections.Orders(), ", "))
	addPodLogs(cmd, &podLogs)
	f.BoolVar(&ends, "kill", false, "end the connections that are listed, after a question")
	f.BoolVar(&yes, "yes", false, "with --kill: do not ask")
	out.flag(cmd)

	return cmd
}

func drawConnections(t *table, all []connections.Connection) {
	t.row("SERVICE", "PROTOCOL", "CLIENT", "POD", "PROCESS", "DESTINATION", "BACKEND", "STATE", "AGE", "SENT", "RECEIVED", "RETRANSMITS", "RTT", "COOKIE")
	for _, c := range all {
		process, state, age, sent, received, retransmits, rtt := "", c.State, "", "", "", "", ""
		if c.Process != nil {
			process = fmt.Sprintf("%s[%d]", c.Process.Command, c.Process.PID)
		}
		if c.AgeSeconds != nil {
			age = seconds(*c.AgeSeconds)
		}
		if c.IdleSeconds != nil {
			state += ", idle " + seconds(*c.IdleSeconds)
		}
		if c.TCP != nil {
			sent, received, retransmits = byteCount(c.TCP.BytesSent), byteCount(c.TCP.BytesReceived), fmt.Sprint(c.TCP.Retransmits)
		}
		if c.TCP != nil && c.TCP.RTTMicroseconds > 0 {
			rtt = (time.Duration(c.TCP.RTTMicroseconds) * time.Microsecond).String()
		}
		t.row(c.Service, c.Protocol, c.Client.String(), cmp.Or(c.Pod, c.PodUID), process, c.OriginalDst.String(), c.Backend.String(),
			state, age, sent, received, retransmits, rtt, fmt.Sprint(c.Cookie))
	}
}

// byteCount returns a number of bytes with three or four digits.
func byteCount(n uint64) string {
	if n < 10_000 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1000 && unit < len("KMGTPE")-1 {
		value, unit = value/1024, unit+1
	}

	return fmt.Sprintf("%.3g %ciB", value, "KMGTPE"[unit])
}

// kill ends the connections, after the answer to a question if it is to ask.
func kill(all []connections.Connection, yes bool, in io.Reader, notes io.Writer) error {
	var ending []connections.Connection
	for _, c := range all {
		if err := c.CanKill(); err != nil {
			fmt.Fprintf(notes, "left alone: socket %d to %s: %v\n", c.Cookie, c.OriginalDst, err)
		} else {
			ending = append(ending, c)
		}
	}
	if len(all) == 0 && yes { // as on most nodes, if all are asked
		_, err := fmt.Fprintln(notes, "0 connections ended")

		return err
	}
	if len(ending) == 0 {
		return errors.New("--kill: there is no such connection; Sluice ends none that it has not translated")
	}
	if !yes {
		fmt.Fprintf(notes, "End %s? [y/N] ", connectionCount(len(ending)))
		answer, err := bufio.NewReader(in).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("answer: %w", err)
		}
		if answer = strings.ToLower(strings.TrimSpace(answer)); answer != "y" && answer != "yes" {
			return errors.New("--kill: nothing was ended")
		}
	}
	n, err := connections.Kill(ending)
	fmt.Fprintf(notes, "%s ended\n", connectionCount(n))

	return err
}

func connectionCount(n int) string {
	if n == 1 {
		return "1 connection"
	}

	return fmt.Sprintf("%d connections", n)
}
