package metrics

import (
	"crypto/rand"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-lb/sluice/maps"
)

// mustCreate returns maps that go with the test.
func mustCreate(t testing.TB) *maps.Pinned {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	root := "/sys/fs/bpf/sluice-metrics-test-" + rand.Text()[:8]
	t.Cleanup(func() { must(t, os.RemoveAll(root)) })
	pinned, err := maps.Create(root, maps.Options{Capacities: map[string]uint32{
		maps.NameFlows: 16, maps.NameHalfOpen: 16, maps.NameSlots: 16, maps.NameAffinity: 16, maps.NameUDPPins: 16,
	}})
	must(t, err)
	t.Cleanup(func() { must(t, pinned.Close()) })

	return pinned
}

// mustOpenStats returns the map of counts, to write what programs would.
func mustOpenStats(t testing.TB, pinned *maps.Pinned) *ebpf.Map {
	t.Helper()
	m := pinned.Replacements()["sl_stats"]
	if m == nil {
		t.Fatal("there is no map of counts")
	}

	return m
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// With real maps, counts of all CPUs come together, and those of an id that is
// gone are deleted.
func TestKernelMaps(t *testing.T) {
	pinned := mustCreate(t)
	counts := mustOpenStats(t, pinned)
	perCPU := make([]uint64, ebpf.MustPossibleCPU())
	for i := range perCPU {
		perCPU[i] = 2
	}
	must(t,
		pinned.ServicePorts.Put(1, maps.ServicePortOf("ns", "web", "http", 6, 4)),
		counts.Put(maps.StatKey{FrontendId: 9, What: sent}, perCPU),
	)
	now := time.Now()
	s, err := NewServices(ServicesConfig{
		Tables: Tables{ServicePorts: pinned.ServicePorts, Backends: pinned.Backends, Loads: pinned.Loads},
		Stats:  pinned.Stats, Limit: 1,
		Moved: func() uint64 { return 0 },
		Now:   func() time.Time { return now },
	})
	must(t, err)
	var stray []uint64
	if err := counts.Lookup(maps.StatKey{FrontendId: 9, What: sent}, &stray); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("counts of an id that is gone: %v, %v", stray, err)
	}
	must(t, counts.Put(maps.StatKey{FrontendId: 1, What: sent}, perCPU))
	now = now.Add(time.Minute)
	expect(t, "all CPUs", only(show(t, s), "connections_total"), map[string]float64{
		"connections_total ns/web": float64(2 * len(perCPU)),
	})
}
