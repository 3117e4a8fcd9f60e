package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Each command that help shows has a page, with each flag that help shows, and there are no other pages.
func TestManPages(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "man1")
	root := newRoot()
	root.SetArgs([]string{"man", folder})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, root := range []*cobra.Command{newRoot(), newPlugin()} {
		want = append(want, root.Name()+".1")
		for _, cmd := range root.Commands() {
			if cmd.Hidden {
				continue
			}
			page := fmt.Sprintf("%s-%s.1", root.Name(), cmd.Name())
			want = append(want, page)
			text, err := os.ReadFile(filepath.Join(folder, page))
			if err != nil {
				t.Error(err)
			}
			if !strings.Contains(string(text), "sluice "+version) {
				t.Errorf("%s does not name the version", page)
			}
			plain := strings.ReplaceAll(string(text), `\`, "")
			cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
				if !flag.Hidden && flag.Deprecated == "" && !strings.Contains(plain, "--"+flag.Name) {
					t.Errorf("%s does not have --%s", page, flag.Name)
				}
			})
		}
	}
	pages, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range pages {
		if name := page.Name(); !slices.Contains(want, name) && !strings.Contains(name, "-completion") {
			t.Errorf("%s is of no command", name)
		}
	}
}

// Shells complete formats, and no names of files.
func TestCompletion(t *testing.T) {
	for args, want := range map[string]string{
		"services --output j":  "table\njson\nyaml\n:4\n", // no files
		"monitor --output ":    "table\njson\n:4\n",
		"version ":             ":4\n",
		"agent --heal ":        "off\neject\nresteer\n:4\n",
		"doctor --forwarding ": "auto\nstack\n:4\n",
		"verif":                "verify\t",
	} {
		var out strings.Builder
		root := commandOf([]string{"sluice"})
		root.SetArgs(append([]string{cobra.ShellCompRequestCmd}, strings.Split(args, " ")...))
		root.SetOut(&out)
		if err := root.Execute(); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%q is completed by %q, %v, want %q", args, out.String(), err, want)
		}
	}
}

// The values that are completed are accepted, and those that a flag's help lists are all there.
func TestCompletedValuesAreAccepted(t *testing.T) {
	for name, values := range flagValues {
		for _, value := range values {
			args := []string{"--" + name + "=" + value}
			if name == "detect-local-mode" {
				args = append(args, "--pod-bridge-interface=br0", "--pod-interface-name-prefix=veth")
			}
			if _, err := toConfig(t, "none", args...); err != nil {
				t.Errorf("%s: %v", args, err)
			}
		}
		usage := newAgentFlagSet().Lookup(name).Usage
		for _, value := range values {
			if name != "version" && name != "nodeport-addresses" && !strings.Contains(usage, value) {
				t.Errorf("--%s: the help does not list %s: %s", name, value, usage)
			}
		}
	}
}
