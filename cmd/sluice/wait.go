package main

import "github.com/spf13/cobra"

// newWait returns the hidden command of the pods of deploy/nodes, in which `kubectl sluice` runs verbs.
func newWait() *cobra.Command {
	return &cobra.Command{
		Use:    "wait",
		Short:  "Do nothing until a signal ends it",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			<-cmd.Context().Done()

			return nil
		},
	}
}
