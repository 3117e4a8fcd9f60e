// Sluice is a replacement for kube-proxy: `sluice agent` runs on every node, and
// the other commands show what it does. newRoot, below, lists them; each has a
// file of its name.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/pkg/status"
)

// version is set by the build.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()

	if err := commandOf(os.Args).ExecuteContext(ctx); err != nil {
		printError(os.Stderr, err)
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

// printError prints the error, after the verifier's log if it refused a program. An agent has to end, to be
// started again, also when what it prints is not read: see logWriter.
func printError(w io.Writer, err error) {
	lines := newLogWriter(printable{w}, new(atomic.Uint64), func(uint64) {})
	if log := datapath.VerifierLog(err); log != "" {
		fmt.Fprintln(lines, log)
	}
	fmt.Fprintf(lines, "sluice: %v\n", err)
	lines.flush()
}

// places are the flags that all commands share: where cgroups, pins and the
// agent's socket are.
type places struct {
	cgroupRoot string
	bpfRoot    string
	socket     string
}

func (p *places) addTo(flags *pflag.FlagSet) {
	flags.StringVar(&p.cgroupRoot, "cgroup-root", "", "translate sockets of processes in this cgroup2 folder and below (default: the root of cgroup2, or the widest cgroup that is mounted)")
	flags.StringVar(&p.bpfRoot, "bpf-root", datapath.FindBPFRoot(), "pin maps and links below this folder on bpffs")
	flags.StringVar(&p.socket, "socket", status.DefaultSocket, "path of the socket on which the agent answers the other commands")
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
	where.addTo(flags)
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
		newWait(),
	)

	return root
}

// addPodLogs adds the flag of verbs that know pods by their names.
func addPodLogs(cmd *cobra.Command, folder *string) {
	cmd.Flags().StringVar(folder, "pod-logs", pods.DefaultLogs, "the kubelet's folder of pods' logs, which has the names of pods")
}

// load returns the maps that are pinned, which the caller closes.
func (p *places) load() (*maps.Pinned, error) {
	pinned, err := maps.Load(p.bpfRoot)
	if !errors.Is(err, fs.ErrNotExist) {
		return pinned, err
	}
	switch folders, errFolders := maps.Folders(p.bpfRoot); {
	case errFolders != nil:
		return nil, errFolders
	case len(folders) > 0:
		return nil, fmt.Errorf("this node is programmed by another build of Sluice, whose maps this one does not know: %w", err)
	}

	return nil, fmt.Errorf("nothing is programmed: %w", err)
}

// cgroup returns --cgroup-root, which must be a cgroup2, or the widest one that is mounted.
func (p *places) cgroup() (string, error) {
	if p.cgroupRoot != "" {
		return p.cgroupRoot, datapath.CheckCgroupRoot(p.cgroupRoot)
	}
	found, err := datapath.FindCgroupRoot()
	if err != nil {
		return "", fmt.Errorf("--cgroup-root is not set: %w", err)
	}

	return found.Path, nil
}

func newVersion() *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of its maps",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return out.printVersion(cmd) },
	}
	out.flag(cmd)

	return cmd
}

func (o *output) printVersion(cmd *cobra.Command) error {
	v := struct {
		Version string `json:"version"`
		Maps    string `json:"maps"`
		Go      string `json:"go"`
	}{version, maps.Version, runtime.Version()}

	return o.print(cmd.OutOrStdout(), v, func(t *table) {
		t.note(fmt.Sprintf("sluice %s, maps %s, %s", v.Version, v.Maps, v.Go))
	})
}
