package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/pods"
	"github.com/sluice-lb/sluice/test/lab"
)

// Flags that make no sense are errors that name the flag, before anything is printed.
func TestMonitorFlags(t *testing.T) {
	root := mustPin(t)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"--service", "nosuch"}, `--service: no Service is called "nosuch"`},
		{[]string{"--ip", "10.96"}, `--ip "10.96": not an IP address`},
		{[]string{"--reason", "drop_source_range,flow"}, `--reason "flow": it is one of translated, reject_no_backend,`},
		{[]string{"--no-follow"}, "--no-follow: without --since there is nothing to print"},
		{[]string{"-o", "yaml"}, `--output "yaml": it is table or json`},
	} {
		out, err := runVerb(root, append([]string{"monitor"}, test.args...)...)
		if err == nil || !strings.HasPrefix(err.Error(), test.want) || out != "" {
			t.Errorf("%v: %v, after %q; want %s", test.args, err, out, test.want)
		}
	}
	for _, test := range []struct{ format, want string }{{"json", ""}, {"table", "TIME UTC CLIENT DESTINATION SERVICE OUTCOME\n"}} {
		out, err := runVerb(root, "monitor", "--since", "10m", "--no-follow", "--service", "shop/web", "-o", test.format)
		if err != nil || squeeze(out) != test.want {
			t.Errorf("-o %s, of no refusals: %v, %q", test.format, err, out)
		}
	}
	cgroups, logs := lab.MustCgroup(t, "monitor").Path(), t.TempDir()
	lab.Must(t, os.Mkdir(filepath.Join(cgroups, "pod0f6c2d5e-6b0b-4b1f-9f0e-1d2c3b4a5968"), 0o755))
	if _, err := runVerb(root, "monitor", "--cgroup-root", cgroups, "--pod-logs", logs, "--pod", "web-0"); !errors.Is(err, pods.ErrNoNames) {
		t.Errorf("a name of a pod, where none is known: %v", err)
	}
	const other = "1a2b3c4d-6b0b-4b1f-9f0e-1d2c3b4a5968"
	for _, verb := range []string{"monitor", "connections"} {
		out, err := runVerb(root, verb, "--cgroup-root", cgroups, "--pod-logs", logs, "--pod", other)
		if want := fmt.Sprintf("pod %q: this node has no such pod", other); err == nil || err.Error() != want || out != "" {
			t.Errorf("%s of a pod that is not there: %v, after %q; want %s", verb, err, out, want)
		}
	}
	if _, err := runVerb(root+"-nosuch", "monitor"); err == nil || !strings.Contains(err.Error(), "nothing is programmed") {
		t.Errorf("without maps: %v", err)
	}
}

// Only so many can listen at a time, and the error says that.
func TestTooManyMonitors(t *testing.T) {
	root := mustPin(t)
	pinned, err := maps.Load(root)
	lab.Must(t, err)
	defer pinned.Close()
	var listeners struct{ Until, Lost [maps.MaxListeners]uint64 }
	for place := range listeners.Until {
		listeners.Until[place] = math.MaxUint64
	}
	lab.Must(t, pinned.Replacements()["sl_listeners"].Put(uint32(0), &listeners))
	_, err = runVerb(root, "monitor")
	if !errors.Is(err, maps.ErrFull) || !strings.HasPrefix(err.Error(), "4 of `sluice monitor` run on this node already") {
		t.Errorf("a fifth one: %v", err)
	}
}
