package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/pkg/remote"
)

// clearScreen is what terminals take for an empty screen.
const clearScreen = "\x1b[H\x1b[2J"

// top shows what Services do on all nodes together: once with --once, else again and again until the command's
// context ends, in place if that is on a terminal.
func (p *plugin) top(cmd *cobra.Command, nodes []remote.Node, words []string) error {
	words = append(words, "--output=json")
	inPlace := term.IsTerminal(int(os.Stdout.Fd()))
	for {
		answers := p.cluster.Ask(cmd.Context(), nodes, func(remote.Node) []string { return words })
		if cmd.Context().Err() != nil {
			return nil
		}
		var text bytes.Buffer // written at once, so that the screen does not flicker
		if err := drawClusterTop(&text, answers, time.Now()); err != nil {
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
	}
}

// drawClusterTop prints the sum of answers of `sluice top -o json`, and which nodes are not in it.
func drawClusterTop(w io.Writer, answers []remote.Answer, now time.Time) error {
	var sum remote.Rates
	var others []remote.Answer
	for _, a := range answers {
		var rates remote.Rates
		if a.Err != nil || a.Code != 0 || json.Unmarshal([]byte(a.Out), &rates) != nil {
			a.Out = ""
			others = append(others, a)

			continue
		}
		sum.Add(a.Node, rates)
	}
	fmt.Fprintf(w, "%s  %d of %d nodes\n", now.Format(time.TimeOnly), len(answers)-len(others), len(answers))
	if err := sum.Write(w, len(answers)); err != nil {
		return err
	}
	remote.JoinErrors(w, others)

	return remote.Join(w, others)
}
