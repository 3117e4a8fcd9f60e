package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// A Service of the client's own making.
var (
	virtual    = netip.MustParseAddrPort("10.96.0.1:80")
	oldBackend = netip.MustParseAddrPort("100.64.0.1:8080")
	newBackend = netip.MustParseAddrPort("100.64.0.2:8080")
)

// mustTranslate translates the Service to one backend, atomically for all connections after
// it.
func mustTranslate(t *testing.T, ns *lab.Namespace, to netip.AddrPort) {
	t.Helper()
	lab.Must(t, ns.Netfilter(fmt.Sprintf(`
table ip service
delete table ip service
table ip service {
	chain output {
		type nat hook output priority -100
		ip daddr %s tcp dport %d dnat to %s
	}
}
`, virtual.Addr(), virtual.Port(), to)))
}

func mustStartProbe(t *testing.T, ns *lab.Namespace, cg *lab.Cgroup) *Probe {
	t.Helper()
	probe, err := StartProbe(ns, cg)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, probe.Close()) })

	return probe
}

// mustProbed is a pair with a server, and a probe at the client.
func mustProbed(t *testing.T) (pair, *Probe) {
	t.Helper()
	p := mustPair(t)
	mustServe(t, p.server)
	// Without a route there is nothing to translate.
	lab.Must(t, p.client.AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParseAddr("10.0.0.2")))

	return p, mustStartProbe(t, p.client, nil)
}

func TestProbeSeesWhenTheBackendChanges(t *testing.T) {
	p, probe := mustProbed(t)
	backends := []netip.AddrPort{oldBackend, newBackend}
	mustTranslate(t, p.client, backends[0])
	for turn := range 6 {
		next := backends[(turn+1)%2]
		awaited, err := probe.Await(t.Context(), virtual, next.Addr())
		lab.Must(t, err)
		earliest := time.Now()
		mustTranslate(t, p.client, next)
		changed := time.Now()
		first, tries, failures, err := awaited.Wait(t.Context())
		latest := time.Now()
		lab.Must(t, err)
		if first.Before(earliest) || first.After(latest) {
			t.Errorf("seen %v after the earliest and %v before the latest moment", first.Sub(earliest), latest.Sub(first))
		}
		if tries < 2 || failures != 0 {
			t.Errorf("%d tries, %d failures, want some and none", tries, failures)
		}
		t.Logf("seen %v after the change, the change took %v", first.Sub(changed), changed.Sub(earliest))
	}
}

func TestProbeSeesWhatIsThereAlready(t *testing.T) {
	p, probe := mustProbed(t)
	mustTranslate(t, p.client, oldBackend)
	earliest := time.Now()
	awaited, err := probe.Await(t.Context(), virtual, oldBackend.Addr())
	lab.Must(t, err)
	begun := time.Now()
	first, tries, failures, err := awaited.Wait(t.Context())
	lab.Must(t, err)
	if tries != 1 || failures != 0 || first.Before(earliest) || first.After(begun) {
		t.Errorf("%d tries, %d failures, seen %v after the start, want the first at once", tries, failures, first.Sub(earliest))
	}
}

func TestProbeCountsFailures(t *testing.T) {
	p, probe := mustProbed(t)
	mustLose(t, p)
	for name, unreachable := range map[string]string{"refused": "10.0.0.2:9", "lost": "100.96.0.1:8080"} {
		mustTranslate(t, p.client, netip.MustParseAddrPort(unreachable))
		awaited, err := probe.Await(t.Context(), virtual, newBackend.Addr())
		lab.Must(t, err)
		mustTranslate(t, p.client, newBackend)
		_, tries, failures, err := awaited.Wait(t.Context())
		lab.Must(t, err)
		if failures == 0 || failures >= tries {
			t.Errorf("%s: %d failures in %d tries, want some, and not all", name, failures, tries)
		}
	}
}

func TestProbeGivesUp(t *testing.T) {
	p, probe := mustProbed(t)
	mustTranslate(t, p.client, oldBackend)
	for range 3 {
		awaited, err := probe.Await(t.Context(), virtual, newBackend.Addr())
		lab.Must(t, err)
		if _, err := probe.Await(t.Context(), virtual, oldBackend.Addr()); err == nil {
			t.Error("no error from waiting for two")
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		enough := errors.New("enough")
		cancel(enough)
		if _, tries, _, err := awaited.Wait(ctx); !errors.Is(err, enough) || tries == 0 {
			t.Errorf("error is %v after %d tries, want %v", err, tries, enough)
		}
		// It is ready for the next.
		awaited, err = probe.Await(t.Context(), virtual, oldBackend.Addr())
		lab.Must(t, err)
		_, _, _, err = awaited.Wait(t.Context())
		lab.Must(t, err)
	}
}

func TestProbeThatEnds(t *testing.T) {
	p, probe := mustProbed(t)
	mustTranslate(t, p.client, oldBackend)
	awaited, err := probe.Await(t.Context(), virtual, newBackend.Addr())
	lab.Must(t, err)
	lab.Must(t, probe.process.cmd.Process.Kill())
	if _, _, _, err := awaited.Wait(t.Context()); err == nil {
		t.Error("no error from waiting for a process that has ended")
	}
	if _, err := probe.Await(t.Context(), virtual, newBackend.Addr()); err == nil {
		t.Error("no error from asking a process that has ended")
	}
}
