package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-lb/sluice/pkg/remote"
	"github.com/sluice-lb/sluice/pkg/top"
)

// clearScreen is what terminals take for an empty screen.
const clearScreen = "\x1b[H\x1b[2J"

// top shows what Services do on all nodes together: once with --once, else again and again until the command's
// context ends, in place if that is on a terminal. A round takes --interval, also if all nodes fail at once.
func (p *plugin) top(cmd *cobra.Command, nodes []remote.Node, words []string, interval time.Duration) error {
	words = append(words, "--output=json")
	inPlace := isTerminal(cmd.OutOrStdout())
	for {
		next := time.After(max(interval, minInterval)) // nodes refuse a shorter one
		answers := p.cluster.Ask(cmd.Context(), nodes, func(remote.Node) []string { return words })
		if cmd.Context().Err() != nil {
			return nil
		}
		var text bytes.Buffer // written at once, so that the screen does not flicker
		if err := drawClusterTop(printable{&text}, answers, cmd.Flag("sort").Value.String()); err != nil {
			return err
		}
		if inPlace && !isSet(cmd, "once") {
			fmt.Fprint(cmd.OutOrStdout(), clearScreen)
		}
		if _, err := text.WriteTo(cmd.OutOrStdout()); err != nil {
			return err
		}
		if isSet(cmd, "once") {
			return codeOfAnswers(answers)
		}
		fmt.Fprintln(cmd.OutOrStdout())
		select {
		case <-cmd.Context().Done():
			return nil
		case <-next:
		}
		found, err := p.cluster.Nodes(cmd.Context(), p.nodes...) // pods of Sluice are replaced
		if err != nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "sluice: the nodes of the last round are asked again: %v\n", err)

			continue
		}
		nodes = found
	}
}

// drawClusterTop prints the sum of answers of `sluice top -o json`, and which nodes are not in it.
func drawClusterTop(w io.Writer, answers []remote.Answer, order string) error {
	var sum top.Table
	var others []remote.Answer // what is left to print of each node
	added := 0
	for _, a := range answers {
		var table top.Table
		if a.Err == nil && a.Code == 0 && json.Unmarshal([]byte(a.Out), &table) == nil {
			sum.Add(a.Node, table)
			added++
		}
		a.Out = ""
		others = append(others, a)
	}
	if err := sum.Sort(order); err != nil {
		return fmt.Errorf("--sort: %w", err)
	}
	fmt.Fprintf(w, "%d of %d nodes\n", added, len(answers))
	if err := sum.Write(w, func(nodes []string) string { return remote.Names(nodes, len(answers)) }); err != nil {
		return err
	}
	remote.JoinErrors(w, others, len(others))

	return remote.Join(w, others, len(others))
}
