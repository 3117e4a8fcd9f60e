package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/datapath"
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
	release, err := agent.Lock(where.socket)
	if errors.Is(err, agent.ErrRunning) {
		return errors.New("an agent is running: stop it first")
	}
	if err != nil {
		return err
	}
	if err := errors.Join(datapath.Remove(where.bpfRoot), release()); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "no program is attached and nothing is pinned below %s\n", where.bpfRoot)

	return nil
}
