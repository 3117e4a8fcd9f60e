package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/ui"
)

func (p *plugin) newUI() *cobra.Command {
	port := 0
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Show Services, their backends and who calls them as a live picture in a browser",
		Long: "Show Services, their backends and who calls them as a live picture in a browser of this machine.\n" +
			"It prints the address, which only works on this machine and until the command ends. Nothing leaves the machine but\n" +
			"what asks the nodes, while a browser shows the page.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.connect(); err != nil {
				return err
			}
			if _, err := p.cluster.Nodes(cmd.Context(), p.nodes...); err != nil {
				return err
			}
			server, err := ui.Listen(port, func(ctx context.Context) (ui.Picture, error) {
				nodes, err := p.cluster.Nodes(ctx, p.nodes...)
				if err != nil {
					return ui.Picture{}, err
				}

				return ui.Collect(ctx, &p.cluster, nodes), nil
			})
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), server.URL())

			return server.Run(cmd.Context())
		},
	}
	cmd.Flags().IntVar(&port, "port", 0, "port of 127.0.0.1 (default: a free one)")

	return cmd
}
