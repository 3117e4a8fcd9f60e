package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/sluice-lb/sluice/test/compat"
	"github.com/sluice-lb/sluice/test/lab"
)

// testdata/kube-proxy-flags.txt was printed by a program that links kube-proxy
// 1.37.2 and walks the flags of its command: name, shorthand, type, default, what
// a flag without a value means, whether it is hidden, and deprecated.
func TestFlagsAreKubeProxys(t *testing.T) {
	text, err := os.ReadFile("testdata/kube-proxy-flags.txt")
	lab.Must(t, err)
	flags := agentFlagSet(t)
	count := 0
	for line := range strings.Lines(string(text)) {
		count++
		name, _, _ := strings.Cut(line, "\t")
		flag := flags.Lookup(name)
		if flag == nil {
			t.Errorf("there is no --%s", name)
			continue
		}
		got := fmt.Sprintf("%s\t%s\t%s\t%q\t%q\t%t\t%t\n", flag.Name, flag.Shorthand, flag.Value.Type(), flag.DefValue,
			flag.NoOptDefVal, flag.Hidden, flag.Deprecated != "")
		if got != line {
			t.Errorf("--%s is\n%swant\n%s", name, got, line)
		}
	}
	if count != 57 {
		t.Errorf("%d flags, kube-proxy has 57", count)
	}
}

func agentFlagSet(t *testing.T) *pflag.FlagSet {
	t.Helper()
	agent, _, err := newRoot().Find([]string{"agent"})
	lab.Must(t, err)
	agent.InitDefaultHelpFlag()

	return agent.LocalFlags()
}

// Each flag has a row in docs/kube-proxy.md with its default, and each row is a flag.
func TestRowsOfFlags(t *testing.T) {
	sections, err := compat.Read("../../test/compat")
	lab.Must(t, err)
	flags := agentFlagSet(t)
	rows := make(map[string]compat.Row)
	for _, row := range sections[0].Rows {
		name := strings.TrimPrefix(row.Name, "--")
		rows[name] = row
		flag := flags.Lookup(name)
		if flag == nil {
			t.Errorf("%s: there is no such flag", row.Name)
			continue
		}
		if shown := strings.TrimSuffix(strings.TrimPrefix(flag.DefValue, "["), "]"); row.Default != shown {
			t.Errorf("%s: the default is %q, and that of the row %q", row.Name, shown, row.Default)
		}
	}
	flags.VisitAll(func(flag *pflag.Flag) {
		if _, ok := rows[flag.Name]; !ok {
			t.Errorf("--%s has no row in flags.yaml", flag.Name)
		}
	})
}

func TestMarkFlagRefuses(t *testing.T) {
	for _, text := range []string{"", "0", "0/0xff", "x", "1/x", "0x100/0x200", "0x100000000", "-1", "1/"} {
		var f markFlag
		if err := f.Set(text); err == nil {
			t.Errorf("%q is %s, want an error", text, f.String())
		}
	}
}
