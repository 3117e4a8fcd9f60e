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
		RunE:  func(cmd *cobra.Command, _ []string) error { return out.printVersion(cmd) },
	}
	out.flag(cmd)

	return cmd
}

// printVersion prints the version for `sluice agent --version`, as JSON for --version=raw.
func printVersion(cmd *cobra.Command, raw bool) error {
	out := newOutput()
	if raw {
		out.format = "json"
	}

	return out.printVersion(cmd)
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
