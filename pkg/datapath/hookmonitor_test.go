package datapath

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Hooks that stop being effective, or are effective again, give one event, and the health
// checks learn it each time unless the state of the hooks is unknown.
func TestHookEvents(t *testing.T) {
	var kinds []EventKind
	var effective []bool
	cfg := HookMonitorConfig{
		Record:    func(e Event) { kinds = append(kinds, e.Kind) },
		Effective: func(is bool) { effective = append(effective, is) },
	}
	gone, other := errors.New("gone"), errors.New("other")
	m := NewHookMonitor(nil, cfg)
	for _, now := range []error{nil, nil, gone, gone, other, nil, nil, ErrNotProbed} {
		m.setEffective(now)
		if m.Effective() != now {
			t.Errorf("it is %v, want %v", m.Effective(), now)
		}
	}
	NewHookMonitor(nil, cfg).setEffective(gone)
	want := []EventKind{HooksNotEffective, HooksNotEffective, HooksEffective, HooksNotEffective, HooksNotEffective}
	if !slices.Equal(kinds, want) {
		t.Errorf("recorded is %v, want %v", kinds, want)
	}
	if want := []bool{true, true, false, false, false, true, true, false}; !slices.Equal(effective, want) {
		t.Errorf("reported is %v, want %v", effective, want)
	}
}

// A trial that was too slow is not one that failed: hooks that are attached make the node ready, and
// those of which the last trial that ended has failed do not.
func TestSlowTrial(t *testing.T) {
	var kinds []EventKind
	m := NewHookMonitor(nil, HookMonitorConfig{Effective: func(bool) {}, Record: func(e Event) { kinds = append(kinds, e.Kind) }})
	failed := fmt.Errorf("%w: connect4", ErrNotEffective)
	for _, test := range []struct {
		now   error
		ready bool
	}{{ErrSlow, true}, {nil, true}, {ErrSlow, true}, {failed, false}, {ErrSlow, false}, {nil, true}} {
		m.setEffective(test.now)
		if problems := m.Problems(); (len(problems) == 0) != test.ready {
			t.Errorf("after %v, problems are %q", test.now, problems)
		}
	}
	if want := []EventKind{HooksNotEffective, HooksEffective}; !slices.Equal(kinds, want) {
		t.Errorf("recorded is %v, want %v", kinds, want)
	}
}

// A node is not ready before hooks and devices were checked once, nor while they have problems.
func TestNotReadyAtTheStart(t *testing.T) {
	m := NewHookMonitor(nil, HookMonitorConfig{Effective: func(bool) {}, Record: func(Event) {}})
	check := func(when string, want ...string) {
		t.Helper()
		if got := m.Problems(); !slices.Equal(got, want) {
			t.Errorf("%s, problems are %q, want %q", when, got, want)
		}
	}
	check("at the start", "hooks are not effective: not checked yet")
	m.setEffective(errors.New("another program detached them"))
	check("with hooks detached", "hooks are not effective: another program detached them")
	m.setEffective(nil)
	check("when ready")
	m.unpinned = errors.New("no bpffs")
	check("with pins missing", "no bpffs")
	devices := NewDeviceMonitor(nil, DeviceMonitorConfig{})
	if got := devices.Problems(); !slices.Equal(got, []string{"devices are not attached yet"}) {
		t.Errorf("problems of devices are %q", got)
	}
}

// If the attached programs use other maps, ours are attached only once the maps have every
// Service: until then, no client would reach one.
func TestHooksWaitForServices(t *testing.T) {
	w := newWebWorld(t)
	lab.Must(t, os.RemoveAll(filepath.Join(w.cfg.BPFRoot, maps.Version)))
	next := w.mustOpen(t, w.cfg)
	lab.Must(t, next.Loaded())
	synced := make(chan struct{})
	m := NewHookMonitor(next, HookMonitorConfig{Synced: synced, Log: slog.New(slog.DiscardHandler)})
	ended := make(chan error, 1)
	go func() { ended <- m.attachFirst(t.Context()) }()
	select {
	case <-m.Tried():
		t.Fatal("programs are attached before the maps have every Service")
	case err := <-ended:
		t.Fatalf("it ends before it has attached: %v", err)
	case <-time.After(time.Second):
	}
	if others, err := next.OtherMapsInUse(); err != nil || !others {
		t.Errorf("programs on other maps are at work: %t, %v, want true", others, err)
	}
	close(synced)
	lab.Must(t, <-ended)
	<-m.Tried()
	if others, err := next.OtherMapsInUse(); err != nil || others {
		t.Errorf("programs on other maps are at work: %t, %v, want false", others, err)
	}
}

// Each feature that the kernel lacks is named, with the kernel that has it.
func TestMissingFeatures(t *testing.T) {
	all := Features{SetRetval: true, NetnsCookie: 1, TCX: true, Tracing: true, FIBMTU: true, FIBSource: true, ChecksumIPv6: true}
	if missing := all.Missing(); len(missing) != 0 {
		t.Errorf("nothing is missing, but reported is %q", missing)
	}
	missing := strings.Join(Features{ConntrackHidden: true}.Missing(), "; ")
	for _, kernel := range []string{"5.11", "5.12", "5.14", "5.18", "6.1)", "6.6", "6.7"} {
		if !strings.Contains(missing, "Linux "+kernel) {
			t.Errorf("nothing of Linux %s in %q", kernel, missing)
		}
	}
	if len(missing) > 1024 {
		t.Errorf("%d bytes do not fit into an Event", len(missing))
	}
}

// Sockets in network namespaces that the agent cannot enter are told once, and searched for less and less often, unless there
// are orphans elsewhere.
func TestSearchesThatFail(t *testing.T) {
	var log bytes.Buffer
	m := NewHookMonitor(nil, HookMonitorConfig{Log: slog.New(slog.NewTextHandler(&log, nil))})
	_, unnamed := DestroySocks([]maps.TranslatedSock{{Netns: 1}, {Netns: 2}})
	_, same := DestroySocks([]maps.TranslatedSock{{Netns: 2}, {Netns: 1}})
	_, other := DestroySocks([]maps.TranslatedSock{{Netns: 3}})
	for i, step := range []struct {
		left, passing int
		err           error
		rest          time.Duration
		logged        int
	}{
		{0, 0, nil, 0, 0},
		{2, 2, nil, orphanInterval, 0},
		{2, 0, unnamed, orphanInterval, 1},
		{2, 0, same, 2 * orphanInterval, 1},
		{2, 0, unnamed, 4 * orphanInterval, 1},
		{2, 1, unnamed, orphanInterval, 1}, // and one in another namespace
		{2, 1, unnamed, orphanInterval, 1},
		{2, 0, unnamed, 2 * orphanInterval, 1},
		{2, 0, other, orphanInterval, 2},
		{1, 0, nil, orphanInterval, 2}, // its socket was ended
		{2, 0, unnamed, orphanInterval, 3},
	} {
		if rest := m.searchAgain(step.left, step.passing, step.err); rest != step.rest {
			t.Errorf("step %d: the next search is after %v, want %v", i, rest, step.rest)
		}
		if n := strings.Count(log.String(), "level=ERROR"); n != step.logged {
			t.Errorf("step %d: there are %d errors, want %d:\n%s", i, n, step.logged, log.String())
		}
	}
	for range 20 {
		m.searchAgain(2, 0, unnamed)
	}
	if m.searchRest != maxSearchRest {
		t.Errorf("the rest is %v in the end, want %v", m.searchRest, maxSearchRest)
	}
}
