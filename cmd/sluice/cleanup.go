package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/kubeproxy"
	"github.com/sluice-lb/sluice/pkg/status"
)

// defaultDrain is how long a cleanup waits for open connections unless --drain is given.
const defaultDrain = time.Minute

func newCleanup(where *places) *cobra.Command {
	ofKubeProxy, drain := false, defaultDrain
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Detach all programs and remove all pins, or remove the rules of kube-proxy; open connections go on",
		Long: `Detach all programs and remove all pins, after the agent has been stopped. Connections that were translated at
a socket go on. Those that are translated at devices are waited for, up to --drain, while new ones pass untranslated.

With --kube-proxy, remove the rules of kube-proxy instead, while the agent runs and after kube-proxy has been stopped.
Connections that the rules have translated go on: until there is none, an empty table inet ` + kubeproxy.KeeperTable + `
of nftables stays. The next cleanup removes it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !ofKubeProxy {
				return cleanUp(cmd, where, drain)
			}
			only, err := lockCleanup(where.bpfRoot)
			if err != nil {
				return err
			}
			defer only.Release()

			return removeKubeProxy(cmd.Context(), cmd.OutOrStdout(), where, drain)
		},
	}
	cmd.Flags().BoolVar(&ofKubeProxy, "kube-proxy", false, "remove the rules that kube-proxy has left behind")
	cmd.Flags().DurationVar(&drain, "drain", drain, "wait so long for open connections; afterwards those of devices are cut, those of kube-proxy's rules are not")

	return cmd
}

// lockCleanup keeps out other cleanups: one that removes Sluice would leave none to translate what another has just
// taken from kube-proxy.
func lockCleanup(bpfRoot string) (*datapath.MapsLock, error) {
	only, err := datapath.LockCleanup(bpfRoot)
	if errors.Is(err, datapath.ErrRunning) {
		return nil, fmt.Errorf("bpf root %q: another cleanup is running: wait until it has ended", bpfRoot)
	}

	return only, err
}

func cleanUp(cmd *cobra.Command, where *places, drain time.Duration) error {
	only, err := lockCleanup(where.bpfRoot)
	if err != nil {
		return err
	}
	defer only.Release()
	unlockSocket, err := status.LockUsedSocket(where.socket)
	if errors.Is(err, datapath.ErrRunning) {
		return fmt.Errorf("socket %q: an agent is running: stop it first", where.socket)
	}
	if err != nil {
		return err
	}
	lock, err := datapath.LockMaps(where.bpfRoot)
	if errors.Is(err, datapath.ErrRunning) {
		err = fmt.Errorf("bpf root %q: an agent is running: stop it first", where.bpfRoot)
	}
	if err == nil {
		if err = drainFlows(cmd.Context(), cmd.OutOrStdout(), where, drain); err == nil {
			listUnowned(cmd.OutOrStdout(), where)
			err = errors.Join(datapath.Remove(where.bpfRoot), status.RemoveSocket(where.socket))
		}
		err = errors.Join(err, lock.Release())
	}
	if err := errors.Join(err, unlockSocket()); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "no program is attached and nothing is pinned below %s\n", where.bpfRoot)

	return errors.Join(releaseKeeper(cmd.Context(), cmd.OutOrStdout(), 0), listOthers(cmd.OutOrStdout(), where))
}

// listUnowned prints which filters the cleanup detaches of which no pin is found, so that they may be another instance's.
func listUnowned(out io.Writer, where *places) {
	cgroupRoot, err := where.cgroup()
	if err != nil {
		return // listOthers prints it
	}
	others, err := datapath.Others(where.bpfRoot, cgroupRoot)
	if err != nil {
		return // listOthers returns it
	}
	for _, o := range others {
		if o.BPFRoot != "" {
			continue
		}
		for _, filter := range o.Filters {
			fmt.Fprintf(out, "detaching a filter of Sluice of which no pin is found here: %s\n", filter)
		}
	}
}

// listOthers prints which other instances of Sluice act on this node, and returns an error if there are some. Where no
// cgroup2 is visible that is not known, and what the cleanup is for is done all the same.
func listOthers(out io.Writer, where *places) error {
	cgroupRoot, err := where.cgroup()
	if err != nil && where.cgroupRoot != "" {
		return fmt.Errorf("whether another Sluice is attached is not known: %w", err)
	}
	if err != nil {
		fmt.Fprintf(out, "warning: whether another Sluice is attached is not known: %v\n", err)

		return nil
	}
	others, err := datapath.Others(where.bpfRoot, cgroupRoot)
	if err != nil {
		return fmt.Errorf("whether another Sluice is attached is not known: %w", err)
	}
	for _, o := range others {
		fmt.Fprintln(out, "left: "+o.String())
		if o.BPFRoot != "" {
			fmt.Fprintf(out, "      remove them by: sluice --bpf-root %s cleanup\n", o.BPFRoot)
		}
		for _, id := range o.Links {
			if o.BPFRoot == "" {
				fmt.Fprintf(out, "      detach one by: bpftool link detach id %d\n", id)
			}
		}
	}
	if len(others) > 0 {
		return errors.New("programs of Sluice are attached to this node nevertheless, see above")
	}

	return nil
}

// drainFlows waits for the flows of devices, keeps netfilter off their ports, and prints how many there are from time to
// time.
func drainFlows(ctx context.Context, out io.Writer, where *places, timeout time.Duration) error {
	pinned, err := maps.Load(where.bpfRoot)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case errors.Is(err, maps.ErrStale):
		fmt.Fprintf(out, "connections that devices translate are cut, because only the build that has made the maps can wait for them: %v\n", err)

		return nil
	case err != nil:
		return err
	}
	defer pinned.Close()
	deadline, printed := time.Now().Add(timeout), time.Time{}
	var unreserved error
	open, err := flow.Drain(ctx, pinned, timeout, func(open []flow.Flow) {
		for _, f := range open {
			if err := kubeproxy.Reserve(f); err != nil {
				unreserved = err
			}
		}
		if len(open) > 0 && time.Since(printed) >= 10*time.Second {
			fmt.Fprintf(out, "%d connections are open that devices translate; new ones pass untranslated; waiting for up to %v\n",
				len(open), max(time.Until(deadline), 0).Round(time.Second))
			printed = time.Now()
		}
	})
	if unreserved != nil {
		fmt.Fprintf(out, "warning: netfilter may have used the port of an open connection for another one: %v\n", unreserved)
	}
	if errors.Is(err, context.Canceled) {
		return fmt.Errorf("interrupted while %d connections are open: programs stay attached for these, and pass new ones; go on with 'sluice cleanup', or start the agent again", open)
	}
	if err == nil && open > 0 {
		fmt.Fprintf(out, "%d connections are cut, which devices still translated after %v: --drain sets how long to wait\n", open, timeout)
	}

	return err
}

// removeKubeProxy removes kube-proxy's rules, waits for the connections that they have translated, and removes the
// table that keeps these alive if there are none left.
func removeKubeProxy(ctx context.Context, out io.Writer, where *places, wait time.Duration) error {
	if process := kubeproxy.Running(); process != "" {
		return fmt.Errorf("process %s: kube-proxy is running: stop it first, or it writes its rules again", process)
	}
	state, err := status.NewClient(where.socket).Status(ctx)
	if err != nil {
		return fmt.Errorf("without Sluice, nothing would translate Services: %w", err)
	}
	if !state.Well() {
		return errors.New("Sluice does not translate every Service yet: see 'sluice status'")
	}
	removed, err := kubeproxy.Remove()
	for _, mode := range removed.Modes {
		fmt.Fprintf(out, "removed: kube-proxy's rules of mode %s\n", mode)
	}
	for _, warning := range removed.Warnings {
		fmt.Fprintln(out, "warning: "+warning)
	}
	if err != nil {
		return err
	}
	if len(removed.Modes) == 0 {
		fmt.Fprintln(out, "kube-proxy has no rules here")
	}

	return releaseKeeper(ctx, out, wait)
}

// releaseKeeper removes the table that keeps connections of kube-proxy's rules alive, if there is one. While there are
// such connections it stays; they are waited for.
func releaseKeeper(ctx context.Context, out io.Writer, wait time.Duration) error {
	for deadline := time.Now().Add(wait); ; {
		open, removed, err := kubeproxy.ReleaseKeeper()
		switch {
		case err != nil:
			return err
		case removed:
			fmt.Fprintf(out, "removed: the table inet %s of nftables\n", kubeproxy.KeeperTable)

			return nil
		case open == 0:
			return nil
		case ctx.Err() != nil || !time.Now().Before(deadline):
			fmt.Fprintf(out, "%d connections are open that netfilter translates, and the table inet %s of nftables keeps alive: run this again when they have ended\n", open, kubeproxy.KeeperTable)

			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
}
