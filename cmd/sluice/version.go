package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/maps"
)

func newVersion() *cobra.Command {
	out := newOutput()
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of its maps",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := struct {
				Version string `json:"version"`
				Maps    string `json:"maps"`
				Go      string `json:"go"`
			}{version, maps.Version, runtime.Version()}

			return out.print(cmd.OutOrStdout(), v, func(t *table) {
				t.note(fmt.Sprintf("sluice %s, maps %s, %s", v.Version, v.Maps, v.Go))
			})
		},
	}
	out.flag(cmd)

	return cmd
}
