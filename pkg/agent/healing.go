package agent

import (
	"context"
	"fmt"
	"log/slog"
	stdmaps "maps"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
)

// healing reports which backends are suspects. Programs notice them and pass them over by themselves.
type healing struct {
	tables maps.Tables
	record func(kube.Event)
	log    *slog.Logger

	known map[uint32]maps.BackendHealth // of the last look, by the index of their ids

	mu     sync.Mutex
	totals metrics.Healing
}

// healingInterval is the time between looks at the health of backends.
const healingInterval = time.Second

// newHealing returns what reports changes from now on.
func newHealing(cfg Config, tables maps.Tables) *healing {
	return &healing{tables: tables, record: cfg.record, log: cfg.Log, known: stdmaps.Collect(tables.Health.All())}
}

// Run looks at the health of backends at intervals until ctx ends. It returns nil.
func (h *healing) Run(ctx context.Context) error {
	tick := time.NewTicker(healingInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			h.look()
		}
	}
}

// Totals returns what the looks so far have found.
func (h *healing) Totals() metrics.Healing {
	h.mu.Lock()
	defer h.mu.Unlock()

	return h.totals
}

// look logs each change of a backend, and records an Event when an episode begins, also if it has
// ended since the last look.
func (h *healing) look() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.totals.Suspects = 0
	for i, now := range h.tables.Health.All() {
		was := h.known[i]
		if was.Id != now.Id {
			was = maps.BackendHealth{}
		}
		b, there := h.tables.BackendOf(now.Id)
		if there && now.IsSuspect() {
			h.totals.Suspects++
		}
		if changed := now.Episodes != was.Episodes || now.IsSuspect() != was.IsSuspect(); there && changed {
			port, ok, err := h.tables.ServicePorts.Lookup(b.ServicePortId)
			if err != nil || !ok {
				continue // the next look tries again
			}
			h.report(port, b.AddrPort(), now, now.Episodes != was.Episodes)
		}
		h.known[i] = now
		h.totals.PassedOver += uint64(now.PassedOver - was.PassedOver)
		h.totals.Episodes += uint64(now.Episodes - was.Episodes)
	}
}

// report reports what has become of a backend. An episode may have several suspicions, and gets one
// Event.
func (h *healing) report(port maps.ServicePort, backend netip.AddrPort, now maps.BackendHealth, begins bool) {
	cause := maps.HealthCause(now.Cause)
	if now.IsSuspect() {
		h.log.Warn("backend is a suspect: new connections go to others", "service", port, "backend", backend, "cause", cause)
	} else {
		h.log.Info("backend is no suspect any more", "service", port, "backend", backend)
	}
	if !begins {
		return
	}
	namespace, name, _ := port.Parts()
	h.record(kube.Event{
		Service: lb.ServiceName{Namespace: namespace, Name: name}, Field: backend.String(),
		Reason: kube.ReasonBackendSuspect, Action: actionConnect,
		Note: fmt.Sprintf("%s: backend %s %s: new connections from this node go to others", port, backend, cause),
	})
}

// forgetHealth clears the suspicions of an earlier agent that healed, if this one does not.
func forgetHealth(health *maps.Array[maps.BackendHealth]) error {
	for i := range health.All() {
		if err := health.Put(i, maps.BackendHealth{}); err != nil {
			return err
		}
	}

	return nil
}
