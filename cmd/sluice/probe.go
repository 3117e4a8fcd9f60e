package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// newProbe is for the agent itself: see [datapath.Verify].
func newProbe() *cobra.Command {
	return &cobra.Command{
		Use:    datapath.ProbeVerb,
		Hidden: true,
		Args:   cobra.NoArgs,
		Run:    func(*cobra.Command, []string) { os.Exit(datapath.ProbeMain()) },
	}
}
