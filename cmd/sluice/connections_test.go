package main

import (
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/pkg/connections"
)

// Flags that cannot be used are errors that name the flag, before anything is read.
func TestConnectionsFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--sort size":         `--sort "size": it is one of age, backend,`,
		"--state open":        `--state "open": it is one of established,`,
		"--backend web-0":     `--backend "web-0": it is neither ADDRESS nor ADDRESS:PORT`,
		"--client 10.0.0.1:x": `--client "10.0.0.1:x": it is neither ADDRESS nor ADDRESS:PORT`,
		"--kill":              "--kill: name a Service, or use --pod,",
		"--kill --pod web-0":  "--kill: several namespaces may have a pod web-0: --pod NAMESPACE/NAME",
	} {
		out, err := runVerb("/nosuch", append([]string{"connections"}, strings.Fields(args)...)...)
		if err == nil || !strings.HasPrefix(err.Error(), want) || out != "" {
			t.Errorf("%s: %v, after %q; want %s", args, err, out, want)
		}
	}
}

// Nothing to end is an error for someone who waits for the question, and none for a script that asks each
// node; what cannot be ended is an error for both.
func TestKillNothing(t *testing.T) {
	loose := []connections.Connection{{State: connections.Unconnected}}
	for _, test := range []struct {
		name    string
		all     []connections.Connection
		yes     bool
		notes   string
		isError bool
	}{
		{"with --yes", nil, true, "0 connections ended\n", false},
		{"without --yes", nil, false, "", true},
		{"an unconnected socket, with --yes", loose, true, "left alone: socket 0 to invalid AddrPort: an unconnected UDP socket has no connection to end\n", true},
	} {
		var notes strings.Builder
		err := kill(test.all, test.yes, strings.NewReader(""), &notes)
		if (err != nil) != test.isError || notes.String() != test.notes {
			t.Errorf("%s: %v, %q, want %q", test.name, err, &notes, test.notes)
		}
	}
}
