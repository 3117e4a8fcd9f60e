package conformance

import (
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// mustLoad opens the maps that the agent of a scene has pinned. They are closed
// with the test.
func mustLoad(t *testing.T, s *scene.Scene) *maps.Pinned {
	t.Helper()
	pinned, err := maps.Load(s.Agent.BPFRoot())
	lab.Must(t, err)
	t.Cleanup(func() { pinned.Close() })

	return pinned
}

func mustRead[K comparable, V any](t *testing.T, table maps.Table[K, V]) map[K]V {
	t.Helper()
	all := make(map[K]V)
	for entry, err := range table.All() {
		lab.Must(t, err)
		all[entry.Key] = entry.Value
	}

	return all
}

// backendIDs are those of the backends that a Service has in the maps.
func backendIDs(t *testing.T, s *scene.Scene, pinned *maps.Pinned, service string) []uint32 {
	t.Helper()
	ports := mustRead(t, pinned.ServicePorts)
	var ids []uint32
	for _, backend := range pinned.Backends.All() {
		port := ports[backend.ServicePortId]
		if backend.Id != 0 && strings.HasPrefix(port.String(), s.Objects.Namespace+"/"+service+":") {
			ids = append(ids, backend.Id)
		}
	}
	slices.Sort(ids)

	return ids
}
