package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/status"
)

func newCleanup(where *places) *cobra.Command {
	return &cobra.Command{
		Use:   "cleanup",
		Short: "Detach all programs and remove all pins; connections that are open stay open",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cleanUp(cmd, where)
		},
	}
}

func cleanUp(cmd *cobra.Command, where *places) error {
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
		err = errors.Join(datapath.Remove(where.bpfRoot), lock.Release())
	}
	if err := errors.Join(err, unlockSocket()); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "no program is attached and nothing is pinned below %s\n", where.bpfRoot)

	return nil
}
