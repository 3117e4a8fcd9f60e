package metrics

import (
	"errors"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/maps/mapstest"
	"github.com/sluice-lb/sluice/test/lab"
)

// mustCount makes every CPU count what programs would, of a service port that has begun.
func mustCount(t testing.TB, pinned *maps.Pinned, id uint32, c maps.PortCounts) {
	t.Helper()
	const perChunk = 256
	var chunk ebpf.MapID
	lab.Must(t, pinned.Replacements()["sl_port_counts"].Lookup(maps.Index(id)/perChunk, &chunk))
	m, err := ebpf.NewMapFromID(chunk)
	lab.Must(t, err)
	defer m.Close()
	perCPU := make([]maps.PortCounts, ebpf.MustPossibleCPU())
	for cpu := range perCPU {
		perCPU[cpu] = c
	}
	lab.Must(t, m.Put(maps.Index(id)%perChunk, perCPU))
}

// refusals is the map of new flows that got no backend.
func refusals(pinned *maps.Pinned) *ebpf.Map { return pinned.Replacements()["sl_refusals"] }

// With real maps, counts of all CPUs come together, also those of an id that was given
// back, and what is left of an id that is gone is deleted.
func TestKernelMaps(t *testing.T) {
	pinned := mapstest.MustCreate(t, nil)
	web, https, stray := uint32(1), maps.ID(300, 1), maps.RefusalKey{ServicePortId: 9, Reason: noBackend}
	lab.Must(t,
		pinned.Stats.Begin(web), pinned.Stats.Begin(https),
		pinned.ServicePorts.Put(web, maps.ServicePortOf("ns", "web", "http", 6, 4)),
		pinned.ServicePorts.Put(https, maps.ServicePortOf("ns", "web", "https", 6, 4)),
		refusals(pinned).Put(stray, uint64(3)),
	)
	now, moved := time.Now(), uint64(0)
	s, err := NewServices(ServicesConfig{
		Tables: maps.Tables{ServicePorts: pinned.ServicePorts, Backends: pinned.Backends, Loads: pinned.Loads},
		Stats:  pinned.Stats, Limit: 1,
		Moved: func() uint64 { return moved },
		Now:   func() time.Time { return now },
	})
	lab.Must(t, err)
	var left uint64
	if err := refusals(pinned).Lookup(stray, &left); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("refusals of an id that is gone: %v, %v", left, err)
	}
	cpus := float64(ebpf.MustPossibleCPU())
	mustCount(t, pinned, web, maps.PortCounts{Connections: 2})
	mustCount(t, pinned, https, maps.PortCounts{Connections: 1})
	connections := func(when string, want float64) {
		t.Helper()
		now = now.Add(time.Minute)
		expect(t, when, only(show(t, s), "connections_total"), map[string]float64{"connections_total ns/web": want})
	}
	connections("all CPUs", 3*cpus)
	mustCount(t, pinned, https, maps.PortCounts{Connections: 5})
	lab.Must(t, pinned.ServicePorts.Delete(https), pinned.Stats.End(https), pinned.Stats.Begin(maps.ID(300, 2)))
	moved++
	connections("an id that was given back", 7*cpus)
}
