package agent

import (
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/lb"
	"github.com/sluice-lb/sluice/pkg/metrics"
	"github.com/sluice-lb/sluice/pkg/queue"
	"github.com/sluice-lb/sluice/pkg/reconcile"
)

// In maps that were empty, frontends are missing until all Services have been programmed
// once. UDP flows and sockets to them are not ended meanwhile, although backends
// go that were inherited.
func TestNothingIsEndedBeforeAllIsProgrammed(t *testing.T) {
	const port = 7
	f := maps.NewFakes(100)
	f.ServicePorts.Entries[port] = maps.ServicePortOf("ns", "web", "dns", uint8(lb.UDP), uint8(lb.IPv4))
	for place, addr := range []string{"10.0.1.7:53", "10.0.1.8:53"} {
		b := maps.BackendOf(uint32(place+1), port, netip.MustParseAddrPort(addr), 0)
		if err := f.Backends.Put(uint32(place+1), b); err != nil {
			t.Fatal(err)
		}
	}
	writer, err := reconcile.New(reconcile.Config{Tables: f.Tables})
	if err != nil {
		t.Fatal(err)
	}
	searched := false
	a := newAgent(Config{Log: slog.New(slog.DiscardHandler)},
		parts{queue: queue.New[*model](nil), metrics: metrics.NewSync(time.Now), writer: writer, endStale: func() { searched = true }})

	writer.Delete(lb.ServiceName{Namespace: "ns", Name: "web"})
	a.apply()
	if f.Backends.Get(1).Id != 0 || f.Backends.Get(2).Id != 0 {
		t.Fatal("the backends are still there")
	}
	if searched {
		t.Error("flows or sockets are looked for that are to be ended")
	}
}
