package health

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/sluice-lb/sluice/maps"
)

// Healing is what is known of backends that do not answer clients of this node.
type Healing struct {
	Suspects   int    // now
	Episodes   uint64 // of backends that became suspects
	PassedOver uint64 // new flows that went to others instead
}

// Backends reports which backends are suspects. Programs notice them and pass them over by themselves.
type Backends struct {
	cfg   BackendsConfig
	known map[uint32]maps.BackendHealth // of those that were ever suspects, at the last look, by the index of their ids
	again bool                          // there may have been suspects at the last look

	mu     sync.Mutex
	totals Healing
}

// BackendsConfig configures a [Backends].
type BackendsConfig struct {
	Tables maps.Tables
	// Suspected is called when an episode begins in which a backend is a suspect, also if it has ended since. An
	// episode may have several suspicions.
	Suspected func(port maps.ServicePort, backend netip.AddrPort, cause maps.HealthCause)
	Log       *slog.Logger
}

// lookInterval is the time between looks at the health of backends.
const lookInterval = time.Second

// NewBackends returns what reports changes from now on.
func NewBackends(cfg BackendsConfig) *Backends {
	b := &Backends{cfg: cfg, known: make(map[uint32]maps.BackendHealth)}
	for i, h := range cfg.Tables.Health.All() {
		b.remember(i, h)
	}
	b.again = len(b.known) > 0

	return b
}

func (b *Backends) remember(i uint32, h maps.BackendHealth) {
	if h.IsSuspect() || h.Episodes > 0 {
		b.known[i] = h
	} else {
		delete(b.known, i)
	}
}

// Run looks at the health of backends at intervals until ctx ends. It returns nil.
func (b *Backends) Run(ctx context.Context) error {
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			b.look()
		}
	}
}

// Totals returns what the looks so far have found.
func (b *Backends) Totals() Healing {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.totals
}

// isProbe reports whether a backend is that by which the agent tries its hooks, which never answers.
func (b *Backends) isProbe(backend maps.Backend) bool {
	port, ok, err := b.cfg.Tables.ServicePorts.Lookup(backend.ServicePortId)

	return err == nil && ok && port.IsProbe()
}

// look logs and counts each change of a backend, and while there are suspects writes at place 0 that programs go on to look
// for them. There are as many backends as the cluster has endpoints, and rarely a suspect among them: without one it reads none.
func (b *Backends) look() {
	b.mu.Lock()
	defer b.mu.Unlock()
	may := b.cfg.Tables.MayBeSuspects()
	if !may && !b.again && b.totals.Suspects == 0 {
		return
	}
	b.again = may
	b.totals.Suspects = 0
	for i, now := range b.cfg.Tables.Health.All() {
		was := b.known[i]
		if was.Id != now.Id {
			was = maps.BackendHealth{}
		}
		backend, there := b.cfg.Tables.BackendOf(now.Id)
		there = there && (now.Episodes == 0 || !b.isProbe(backend))
		if there && now.IsSuspect() {
			b.totals.Suspects++
		}
		if begins := now.Episodes != was.Episodes; there && (begins || now.IsSuspect() != was.IsSuspect()) {
			port, ok, err := b.cfg.Tables.ServicePorts.Lookup(backend.ServicePortId)
			if err != nil || !ok {
				continue // the next look tries again
			}
			cause := maps.HealthCause(now.Cause)
			if now.IsSuspect() {
				b.cfg.Log.Warn("backend is a suspect: new connections go to others", "service", port, "backend", backend.AddrPort(), "cause", cause)
			} else {
				b.cfg.Log.Info("backend is no suspect any more", "service", port, "backend", backend.AddrPort())
			}
			if begins {
				b.cfg.Suspected(port, backend.AddrPort(), cause)
			}
		}
		b.remember(i, now)
		b.totals.PassedOver += uint64(now.PassedOver - was.PassedOver)
		b.totals.Episodes += uint64(now.Episodes - was.Episodes)
	}
	if b.totals.Suspects > 0 {
		if err := b.cfg.Tables.NoteSuspects(); err != nil {
			b.cfg.Log.Error("suspects stay without being noted", "err", err)
		}
	}
}

// Forget clears the suspicions of an earlier agent that healed, if this one does not.
func Forget(backends *maps.Array[maps.BackendHealth]) error {
	for i := range backends.All() {
		if err := backends.Put(i, maps.BackendHealth{}); err != nil {
			return err
		}
	}

	return nil
}
