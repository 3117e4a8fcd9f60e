package e2e

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/test/sluice"
)

// dump is what the maps hold, with its ids and slots.
type dump struct {
	Frontends map[maps.FrontendKey]maps.Frontend
	Backends  map[uint32]maps.Backend
	Ports     map[uint32]maps.ServicePort
}

// mustLoad opens the maps that an agent has pinned. They are closed with the
// test.
func mustLoad(t testing.TB, n *sluice.Node) *maps.Pinned {
	t.Helper()
	pinned, err := maps.Load(n.BPFRoot())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pinned.Close() })

	return pinned
}

func mustDump(t testing.TB, pinned *maps.Pinned) dump {
	t.Helper()

	return dump{
		Frontends: mustRead(t, pinned.Frontends),
		Backends:  mustRead(t, pinned.Backends),
		Ports:     mustRead(t, pinned.ServicePorts),
	}
}

func mustRead[K comparable, V any](t testing.TB, table maps.Table[K, V]) map[K]V {
	t.Helper()
	entries := make(map[K]V)
	for entry, err := range table.All() {
		if err != nil {
			t.Fatal(err)
		}
		entries[entry.Key] = entry.Value
	}

	return entries
}

// mustEqual fails the test if an agent changed what it should have kept.
func mustEqual(t testing.TB, after, before dump) {
	t.Helper()
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the maps are not as before (-before +after):\n%s", diff)
	}
}

// mustLeadSomewhere fails the test if a frontend leads to a backend that does
// not exist, or is another's.
func mustLeadSomewhere(t testing.TB, pinned *maps.Pinned) []agent.Frontend {
	t.Helper()
	frontends, problems, err := agent.Programmed(pinned.Tables)
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range problems {
		t.Error(problem)
	}

	return frontends
}
