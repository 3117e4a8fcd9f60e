// Sluice is a replacement for kube-proxy: `sluice agent` runs on every node, and
// the other commands show what it does. newRoot, below, lists them; each has a
// file of its name.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

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

	if err := newRoot().ExecuteContext(ctx); err != nil {
		printError(err)
		os.Exit(exitCode(err))
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
	root := &cobra.Command{
		Use:           "sluice",
		Short:         "Kubernetes Services without kube-proxy",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&where.cgroupRoot, "cgroup-root", "", "translate sockets of processes in this cgroup2 folder and below (default: the root of cgroup2, or the widest cgroup that is mounted)")
	flags.StringVar(&where.bpfRoot, "bpf-root", datapath.FindBPFRoot(), "pin maps and links below this folder on bpffs")
	flags.StringVar(&where.socket, "socket", status.DefaultSocket, "path of the socket on which the agent answers the other commands")

	root.AddCommand(
		newAgent(&where),
		newStatus(&where),
		newServices(&where),
		newBackends(&where),
		newFlows(&where),
		newConnections(&where),
		newMonitor(&where),
		newVerify(&where),
		newDoctor(&where),
		newCleanup(&where),
		newVersion(),
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
