package agent

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// An episode gets one Event, and each of its suspicions a line in the log; what an earlier agent
// has seen gets none.
func TestHealingIsReported(t *testing.T) {
	fakes := maps.NewFakes(100)
	hand := mapstest.New(fakes.Tables)
	port, err := hand.ServicePort()
	if err != nil {
		t.Fatal(err)
	}
	var ids []uint32
	for i := range 2 {
		id, err := hand.Backend(port, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), 80), 0)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	put := func(i int, h maps.BackendHealth) {
		t.Helper()
		h.Id, h.Cause = ids[i], uint8(maps.HealthUnanswered)
		if err := fakes.Health.Put(maps.Index(ids[i]), h); err != nil {
			t.Fatal(err)
		}
	}
	put(1, maps.BackendHealth{Suspected: 1, Episodes: 3, PassedOver: 1000})
	var events []kube.Event
	var log bytes.Buffer
	h := newHealing(Config{events: func(e kube.Event) { events = append(events, e) }, Log: slog.New(slog.NewTextHandler(&log, nil))}, fakes.Tables)
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
		put(0, step.health)
		h.look()
		if lines := strings.Count(log.String(), "\n"); len(events) != step.events || lines != step.lines {
			t.Errorf("%s: %d events and %d lines, want %d and %d:\n%s", step.what, len(events), lines, step.events, step.lines, log.String())
		}
	}
	const note = "test/service-1: backend 10.0.0.1:80 does not answer: new connections from this node go to others"
	if e := events[0]; e.Note != note || e.Service.Name != "service-1" || e.Field != "10.0.0.1:80" || e.Reason != kube.ReasonBackendSuspect {
		t.Errorf("the event is %+v", e)
	}
	if got, want := h.Totals(), (metrics.Healing{Suspects: 1, Episodes: 2, PassedOver: 12}); got != want {
		t.Errorf("totals are %+v, want %+v", got, want)
	}

	if err := forgetHealth(fakes.Health); err != nil {
		t.Fatal(err)
	}
	h.look()
	if got := h.Totals().Suspects; got != 0 {
		t.Errorf("%d suspects are left of an agent that healed", got)
	}
}
