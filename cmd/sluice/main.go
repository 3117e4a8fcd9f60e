// Sluice is a replacement for kube-proxy: `sluice agent` runs on every node, and
// the other commands show what it does. newRoot, below, lists them; each has a
// file of its name.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
)

// version is set by the build.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()

	if err := commandOf(os.Args).ExecuteContext(ctx); err != nil {
		printError(err)
		os.Exit(exitCode(err))
	}
}

// commandOf returns the command of the name by which this program was started.
func commandOf(args []string) *cobra.Command {
	switch filepath.Base(args[0]) {
	case pluginName:
		return newPlugin()
	case completionName:
		plugin := newPlugin()
		plugin.SetArgs(append([]string{cobra.ShellCompRequestCmd}, args[1:]...))

		return plugin
	default:
		root := newRoot()
		addCompletion(root, programmedNames)

		return root
	}
}

// printError prints the error, after the verifier's log if it refused a program.
func printError(err error) {
	if log := datapath.VerifierLog(err); log != "" {
		fmt.Fprintln(os.Stderr, log)
	}
	fmt.Fprintf(os.Stderr, "sluice: %v\n", err)
}

// places are the flags that all commands share: where cgroups, pins and the
// agent's socket are.
type places struct {
	cgroupRoot string
	bpfRoot    string
	socket     string
}

func newRoot() *cobra.Command {
	var where places
	var withStdin bool
	root := &cobra.Command{
		Use:           "sluice",
		Short:         "Kubernetes Services without kube-proxy",
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			if withStdin {
				endWithStdin(cmd)
			}
		},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&where.cgroupRoot, "cgroup-root", "", "translate sockets of processes in this cgroup2 folder and below (default: the root of cgroup2, or the widest cgroup that is mounted)")
	flags.StringVar(&where.bpfRoot, "bpf-root", datapath.FindBPFRoot(), "pin maps and links below this folder on bpffs")
	flags.StringVar(&where.socket, "socket", status.DefaultSocket, "path of the socket on which the agent answers the other commands")
	flags.BoolVar(&withStdin, "end-with-stdin", false, "end when the standard input ends")
	_ = flags.MarkHidden("end-with-stdin") // it exists

	root.AddCommand(
		newAgent(&where),
		newStatus(&where),
		newServices(&where),
		newBackends(&where),
		newFlows(&where),
		newConnections(&where),
		newMonitor(&where),
		newTop(&where),
		newExplain(&where),
		newVerify(&where),
		newDoctor(&where),
		newCleanup(&where),
		newVersion(),
		newMan(),
		newProbe(),
	)

	return root
}

// cgroup returns --cgroup-root, or the widest cgroup that is mounted.
func (p *places) cgroup() (string, error) {
	if p.cgroupRoot != "" {
		return p.cgroupRoot, nil
	}
	found, err := datapath.FindCgroupRoot()
	if err != nil {
		return "", fmt.Errorf("--cgroup-root is not set: %w", err)
	}

	return found.Path, nil
}
