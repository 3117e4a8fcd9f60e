package health

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// An episode is reported once, and each of its suspicions a line in the log; what an earlier agent
// has seen is not reported.
func TestSuspectsAreReported(t *testing.T) {
	fakes := maps.NewFakes(100)
	hand := mapstest.New(fakes.Tables)
	port, err := hand.ServicePort()
	lab.Must(t, err)
	var ids []uint32
	for i := range 2 {
		id, err := hand.Backend(port, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80), 0)
		lab.Must(t, err)
		ids = append(ids, id)
	}
	put := func(i int, h maps.BackendHealth) {
		t.Helper()
		h.Id, h.Cause = ids[i], uint8(maps.HealthUnanswered)
		lab.Must(t, fakes.Health.Put(maps.Index(ids[i]), h))
	}
	note := func(until uint64) {
		t.Helper()
		lab.Must(t, fakes.Health.Put(0, maps.BackendHealth{Until: until}))
	}
	put(1, maps.BackendHealth{Suspected: 1, Episodes: 3, PassedOver: 1000})
	var events []string
	var log bytes.Buffer
	b := NewBackends(BackendsConfig{
		Tables: fakes.Tables, Log: slog.New(slog.NewTextHandler(&log, nil)),
		Suspected: func(port maps.ServicePort, backend netip.AddrPort, cause maps.HealthCause) {
			events = append(events, fmt.Sprintf("%s %s %s", port, backend, cause))
		},
	})
	for _, step := range []struct {
		what   string
		health maps.BackendHealth
		events int
		lines  int
	}{
		{"it answers", maps.BackendHealth{}, 0, 0},
		{"it is a suspect", maps.BackendHealth{Suspected: 1, Episodes: 1, PassedOver: 5}, 1, 1},
		{"it still is", maps.BackendHealth{Suspected: 1, Episodes: 1, PassedOver: 9}, 1, 1},
		{"it answers again", maps.BackendHealth{Episodes: 1, PassedOver: 9}, 1, 2},
		{"it is a suspect, in the same episode", maps.BackendHealth{Suspected: 7, Episodes: 1, PassedOver: 10}, 1, 3},
		{"it answers, and was a suspect in another episode", maps.BackendHealth{Episodes: 2, PassedOver: 12}, 2, 4},
	} {
		if step.health.Episodes > 0 {
			note(1)
		}
		put(0, step.health)
		b.look()
		if lines := strings.Count(log.String(), "\n"); len(events) != step.events || lines != step.lines {
			t.Errorf("%s: %d events and %d lines, want %d and %d:\n%s", step.what, len(events), lines, step.events, step.lines, log.String())
		}
	}
	if want := "test/service-1 10.0.0.1:80 does not answer"; events[0] != want {
		t.Errorf("%q is suspected, want %q", events[0], want)
	}
	if got, want := b.Totals(), (Healing{Suspects: 1, Episodes: 2, PassedOver: 12}); got != want {
		t.Errorf("totals are %+v, want %+v", got, want)
	}

	note(0)
	put(0, maps.BackendHealth{Episodes: 2, PassedOver: 13})
	put(1, maps.BackendHealth{Episodes: 3, PassedOver: 1001})
	b.look()
	if got, want := b.Totals(), (Healing{Episodes: 2, PassedOver: 14}); got != want {
		t.Errorf("once no suspect is noted any more, totals are %+v, want %+v", got, want)
	}
	put(0, maps.BackendHealth{Episodes: 2, PassedOver: 1000})
	b.look()
	if got := b.Totals().PassedOver; got != 14 {
		t.Errorf("without a suspect backends are read: %d were passed over, want 14", got)
	}
	note(1)
	b.look()
	if got := b.Totals().PassedOver; got != 1001 {
		t.Errorf("with a suspect, %d were passed over, want 1001", got)
	}

	put(0, maps.BackendHealth{Suspected: 1, Episodes: 3})
	b.look()
	if until := fakes.Health.Get(0).Until; until <= maps.Now() {
		t.Error("programs do not look for a suspect that has got no probe for long")
	}
	lab.Must(t, Forget(fakes.Health))
	b.look()
	if got := b.Totals().Suspects; got != 0 {
		t.Errorf("%d suspects are left of an agent that healed", got)
	}
}
