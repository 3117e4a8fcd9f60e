package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// newProbe returns the hidden command that [datapath.Verify] starts in the cgroup root.
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:    datapath.ProbeVerb,
		Hidden: true,
		Args:   cobra.NoArgs,
		Run:    func(*cobra.Command, []string) { os.Exit(datapath.ProbeMain()) },
	}
}
