package agent

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/pkg/node"
)

// In a small cluster garbage may grow to the size of the heap, in a large one to a quarter of it.
func TestGCPercent(t *testing.T) {
	const mib = 1 << 20
	for _, test := range []struct {
		kept       uint64
		most, want int
	}{
		{0, startGC, 200}, {20 * mib, startGC, 200}, {80 * mib, startGC, 125}, {400 * mib, startGC, 25}, {4000 * mib, startGC, 25},
		{0, usualGC, 100}, {80 * mib, usualGC, 100}, {200 * mib, usualGC, 50}, {4000 * mib, usualGC, 25},
	} {
		if percent := gcPercent(test.kept, test.most); percent != test.want {
			t.Errorf("%d MiB, at most %d %%: %d %%, want %d", test.kept/mib, test.most, percent, test.want)
		}
	}
}

// Rules about devices that make no sense are an error which names them.
func TestDeviceRulesAreValidated(t *testing.T) {
	cfg := Config{NodeName: "node-1", Manifests: "folder", Socket: "agent.sock", Log: slog.New(slog.DiscardHandler)}
	cfg.Devices = node.Rules{Never: []node.Pattern{{Glob: "eth0", Class: node.ClassPods}}}
	if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), "config: Devices: ") {
		t.Errorf("the error is %v", err)
	}
}

// Packets to other nodes pass the stack if the configuration says so, or the kernel cannot do without.
func TestAlwaysThroughStack(t *testing.T) {
	for _, test := range []struct {
		cfg    Config
		fibMTU bool
		want   string
	}{
		{Config{}, true, ""},
		{Config{}, false, "the kernel's lookup of routes knows no MTU (Linux 5.12)"},
		{Config{ThroughStack: true}, true, "--forwarding stack"},
	} {
		if got := alwaysThroughStack(test.cfg, datapath.Features{FIBMTU: test.fibMTU}); got != test.want {
			t.Errorf("%t, with the MTU %t: %q, want %q", test.cfg.ThroughStack, test.fibMTU, got, test.want)
		}
	}
}

// An agent of which a part hangs at its end ends without it, and tells why it had to end.
func TestAgentEndsWithoutWhatGoesOn(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	changed, hangs := errors.New("the configuration has changed"), make(chan error)
	defer close(hangs)
	end(changed)
	if err := awaitEnd(ctx, func() error { return <-hangs }, time.Millisecond); !errors.Is(err, errGoesOn) || !errors.Is(err, changed) {
		t.Errorf("the error is %v, want one that wraps %q and %q", err, errGoesOn, changed)
	}
	if err := awaitEnd(ctx, func() error { time.Sleep(10 * time.Millisecond); return changed }, time.Minute); err != changed {
		t.Errorf("the error is %v, want %v", err, changed)
	}
}
