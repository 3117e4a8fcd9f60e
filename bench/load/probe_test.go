package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
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

// mustProbed is a pair with a server, and a probe at the client.
func mustProbed(t *testing.T) (pair, *Probe) {
	t.Helper()
	p := mustPair(t)
	mustServe(t, p.server)
	// Without a route there is nothing to translate.
	lab.Must(t, p.client.AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParseAddr("10.0.0.2")))
	probe, err := StartProbe(p.client, nil)
	lab.Must(t, err)
	t.Cleanup(func() { lab.Must(t, probe.Close()) })

	return p, probe
}

// A probe sees when the backend changes, and at once what is there already.
func TestProbe(t *testing.T) {
	p, probe := mustProbed(t)
	backends := []netip.AddrPort{oldBackend, newBackend}
	mustTranslate(t, p.client, backends[0])
	for turn := range 6 {
		current, next := backends[turn%2], backends[(turn+1)%2]
		for _, backend := range []netip.AddrPort{current, next} {
			earliest := time.Now()
			lab.Must(t, probe.Await(t.Context(), virtual, backend.Addr(), time.Minute))
			if backend == next {
				earliest = time.Now()
				mustTranslate(t, p.client, next)
			}
			first, err := probe.Wait(t.Context())
			latest := time.Now()
			lab.Must(t, err)
			if first.Before(earliest) || first.After(latest) {
				t.Errorf("seen %v after the earliest and %v before the latest moment", first.Sub(earliest), latest.Sub(first))
			}
		}
	}
}

// When its time is over it says how many tries failed, and is ready for the next.
func TestProbeGivesUp(t *testing.T) {
	p, probe := mustProbed(t)
	mustLose(t, p)
	for name, target := range map[string]string{"another backend": "100.64.0.1:8080", "refused": "10.0.0.2:9", "lost": "100.96.0.1:8080"} {
		mustTranslate(t, p.client, netip.MustParseAddrPort(target))
		lab.Must(t, probe.Await(t.Context(), virtual, newBackend.Addr(), 100*time.Millisecond))
		if _, err := probe.Wait(t.Context()); err == nil || !strings.Contains(err.Error(), "of them failed") {
			t.Errorf("%s: error is %v, want that it gave up", name, err)
		}
	}
	mustTranslate(t, p.client, newBackend)
	lab.Must(t, probe.Await(t.Context(), virtual, newBackend.Addr(), time.Minute))
	_, err := probe.Wait(t.Context())
	lab.Must(t, err)
}

// The end of a context ends the probe.
func TestProbeThatEnds(t *testing.T) {
	p, probe := mustProbed(t)
	mustTranslate(t, p.client, oldBackend)
	lab.Must(t, probe.Await(t.Context(), virtual, newBackend.Addr(), time.Hour))
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cancel(enough)
	if _, err := probe.Wait(ctx); !errors.Is(err, enough) {
		t.Errorf("error is %v, want %v", err, enough)
	}
	if err := probe.Await(t.Context(), virtual, newBackend.Addr(), time.Hour); err == nil {
		t.Error("no error from asking a process that has ended")
	}
}
