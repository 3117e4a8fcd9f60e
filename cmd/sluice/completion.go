package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/config"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/status"
)

// addCompletion lets shells complete the arguments of all commands: names of Services, which services returns, and
// the formats of --output.
func addCompletion(root *cobra.Command, services cobra.CompletionFunc) {
	for _, cmd := range root.Commands() {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
		if strings.Contains(cmd.Use, "[NAMESPACE/NAME]") {
			cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
				if len(args) > 0 {
					return nil, cobra.ShellCompDirectiveNoFileComp
				}

				return services(cmd, args, word)
			}
		}
		for _, flag := range []string{"service", "to"} {
			if cmd.Flags().Lookup(flag) != nil {
				mustComplete(cmd, flag, services)
			}
		}
		for flag, values := range flagValues {
			if cmd.Flags().Lookup(flag) != nil {
				mustComplete(cmd, flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
			}
		}
		if cmd.Flags().Lookup("output") != nil {
			formats := []string{"table", "json", "yaml"}
			if cmd.Name() == "monitor" { // which prints event by event
				formats = formats[:2]
			}
			mustComplete(cmd, "output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// flagValues are the values of flags that take one of some words.
var flagValues = map[string][]string{
	"algorithm": {"random", "rr", "lc", "sed", "nq", "sh", "dh", "maglev"}, "heal": {"off", "eject", "resteer"}, "udp": {"all", "off"},
	"device-attach": {"tcx", "clsact"}, "forwarding": {"auto", "stack"}, "version": {"true", "false", "raw"},
	"proxy-mode":         {string(config.ModeIPTables), string(config.ModeIPVS), string(config.ModeNFTables)},
	"detect-local-mode":  {string(config.LocalClusterCIDR), string(config.LocalNodeCIDR), string(config.LocalBridgeInterface), string(config.LocalInterfaceNamePrefix)},
	"nodeport-addresses": {lb.NodePortsPrimary, lb.NodePortsLocalhost, lb.NodePortsAll},
}

// mustComplete sets how the values of a flag, which the command has, are completed.
func mustComplete(cmd *cobra.Command, flag string, complete cobra.CompletionFunc) {
	if err := cmd.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err)
	}
}

// programmedNames completes the names of the Services that are in this node's maps.
func programmedNames(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	pinned, err := maps.Load(cmd.Flag("bpf-root").Value.String())
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer pinned.Close()
	names, err := status.ServiceNames(pinned.Tables)
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}

	return names, cobra.ShellCompDirectiveNoFileComp
}

// newMan returns the command that writes man pages, of this build.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man FOLDER",
		Short:   "Write the man pages of all verbs, also of kubectl sluice, into a folder",
		Example: "  sluice man /usr/local/share/man/man1",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return fmt.Errorf("folder of the man pages: %w", err)
			}
			for _, root := range []*cobra.Command{cmd.Root(), newPlugin()} {
				root.DisableAutoGenTag = true
				header := &doc.GenManHeader{Section: "1", Source: "sluice " + version, Manual: "Sluice"}
				if err := doc.GenManTree(root, header, args[0]); err != nil {
					return fmt.Errorf("man pages: %w", err)
				}
			}

			return nil
		},
	}
}
