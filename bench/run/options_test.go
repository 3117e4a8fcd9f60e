package main

import (
	"io"
	"strings"
	"testing"
)

// A wrong flag is refused before anything is built, and the error names the flag.
func TestBadFlags(t *testing.T) {
	for _, test := range []struct{ flag, value, want string }{
		{"--services", "0", "--services: 0"},
		{"--services", "600000", "--services: plan of 600000 Services"},
		{"--endpoints", "1", "--endpoints: 1"},
		{"--proxies", "haproxy", `--proxies: "haproxy"`},
		{"--proxies", "ref", `--proxies: "ref"`},
		{"--proxies", "sluice,sluice", "--proxies: sluice is there twice"},
		{"--proxies", "baseline", "--baseline: it goes with"},
		{"--baseline", "sluice", "--baseline: it goes with"},
		{"--only", "(", "--only: error parsing regexp"},
		{"--rounds", "0", "--rounds: 0"},
		{"--duration", "-1s", "--duration: "},
		{"--warm-up", "-1s", "--warm-up"},
	} {
		t.Run(test.flag+" "+test.value, func(t *testing.T) {
			cmd := command()
			cmd.SetArgs([]string{test.flag, test.value})
			cmd.SetErr(io.Discard)
			cmd.SetOut(io.Discard)
			if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("the error is %v, want %q", err, test.want)
			}
		})
	}
}
