package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/pkg/flow"
	"github.com/sluice-lb/sluice/pkg/health"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/lab"
)

// The addresses of a Service that is deleted stay known for the flows to them:
// each until a sweep has found none.
func TestAddressesOutliveTheirService(t *testing.T) {
	pinned := mapstest.MustCreate(t, nil)
	a := mustRunLoopOnPinned(t, pinned)
	sweeper, err := flow.New(flow.Config{Maps: pinned})
	lab.Must(t, err)
	sweep := func() {
		t.Helper()
		if _, err := sweeper.Sweep(); err != nil {
			t.Fatal(err)
		}
		pruneAddrs(a.queue, a.writer, sweeper.OriginalDsts())
	}
	inUse, idle := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("192.0.2.1")
	sinkOf(a).SetService(*web(), nil)
	mustBeKnown(t, pinned, inUse, true)
	mustBeKnown(t, pinned, idle, true)
	inFlow := mustPutFlow(t, pinned.Flows, 1)

	sinkOf(a).DeleteService(web().Name)
	mustHaveNoFrontends(t, a)
	a.mustRetireAll(t)
	mustBeKnown(t, pinned, inUse, true)
	mustBeKnown(t, pinned, idle, true)

	// The look must have begun after the grace period of the last frontend.
	lab.Eventually(t, "the idle address is forgotten", func() bool { sweep(); return !isKnown(t, pinned, idle) })
	mustBeKnown(t, pinned, inUse, true)

	lab.Must(t, pinned.Flows.Delete(inFlow))
	sweep()
	mustBeKnown(t, pinned, inUse, false)
}

// mustPutFlow puts a UDP flow of one entry, to a backend that does not exist.
func mustPutFlow(t *testing.T, m *maps.Map[maps.FlowKey, maps.Flow], client int) maps.FlowKey {
	t.Helper()
	f := maps.Flow{
		Client: maps.AddrOf(netip.MustParseAddr("198.51.100.7")), ClientPort: uint16(client),
		OriginalDst: maps.AddrOf(netip.MustParseAddr("10.96.0.1")), OriginalPort: maps.Port(53),
		Proto: 17, Role: maps.FlowFromClient, State: maps.FlowOpen, LastSeen: maps.Now(),
	}
	lab.Must(t, m.Put(f.Key(f.Role), f))

	return f.Key(f.Role)
}

// idleSource is a cluster without changes of its own.
type idleSource struct{}

func (idleSource) Run(context.Context) error   { return nil }
func (idleSource) Synced() <-chan struct{}     { return nil }
func (idleSource) NodeSynced() <-chan struct{} { return nil }
func (idleSource) PodsSynced() <-chan struct{} { return nil }

func (idleSource) Silence() map[string]time.Duration { return nil }

// mustRunLoopOnPinned returns an agent whose loop runs, on maps that have no programs.
func mustRunLoopOnPinned(t *testing.T, pinned *maps.Pinned) *agent {
	t.Helper()
	writer, err := reconcile.New(reconcile.Config{Tables: pinned.Tables})
	lab.Must(t, err)
	cfg := Config{NodeName: "node-1", Log: slog.New(slog.DiscardHandler)}
	proxy := health.NewProxy(health.ProxyConfig{})
	a := newAgent(cfg, parts{
		queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), source: idleSource{}, writer: writer, tables: pinned.Tables, proxy: proxy,
		checks: health.NewServices(health.ServicesConfig{Healthy: proxy.Healthy}), waitForPrograms: pinned.WaitForPrograms,
	})
	a.synced, a.complete = true, true
	lab.MustRun(t, a.loop)

	return a
}

// mustHaveNoFrontends waits until the writer knows that all frontends have gone.
func mustHaveNoFrontends(t *testing.T, a *agent) {
	t.Helper()
	lab.Eventually(t, "no frontends are left", func() bool {
		used, err := queue.Ask(t.Context(), a.queue, func() int { return a.writer.Counters().Fill[maps.NameFrontendIDs].Used })
		lab.Must(t, err)

		return used == 0
	})
}

// isKnown reports whether an address is known as a Service's.
func isKnown(t *testing.T, pinned *maps.Pinned, addr netip.Addr) bool {
	t.Helper()
	use, _, err := pinned.Addrs.Lookup(maps.AddrOf(addr))
	lab.Must(t, err)

	return use.Flags&maps.AddrService != 0
}

// mustBeKnown waits until an address is known as a Service's, or is not.
func mustBeKnown(t *testing.T, pinned *maps.Pinned, addr netip.Addr, want bool) {
	t.Helper()
	lab.Eventually(t, fmt.Sprintf("%s: known as a Service's is %v", addr, want), func() bool { return isKnown(t, pinned, addr) == want })
}
