package conformance

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// tampered is a Service, and what the maps have of it.
//
//	clients ──── web:80 ─┬─ pod-1-0
//	                     └─ pod-2-0
type tampered struct {
	*scene.Scene
	address   string
	names     []string // of the pods that answer
	pinned    *maps.Pinned
	frontends map[maps.FrontendKey]uint32 // their ids
	pools     map[uint32]maps.Pool
	backends  map[uint32]maps.Backend
}

func mustTamper(t *testing.T) *tampered {
	t.Helper()
	s := scene.MustSet(t, scene.Config{Args: []string{"--config-sync-period", "1h"}})
	m := &tampered{
		Scene:     s,
		names:     scene.Names(s.Local()[0], s.Remote()[0]),
		frontends: make(map[maps.FrontendKey]uint32),
		pools:     make(map[uint32]maps.Pool),
		backends:  make(map[uint32]maps.Backend),
	}
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
	ip := s.CreateService(t, "web").Spec.ClusterIPs[0]
	m.address = scene.At(ip, 80)
	m.mustWork(t)
	m.pinned = sluice.MustLoad(t, s.Agent)
	for key, id := range sluice.MustRead(t, m.pinned.FrontendIDs) {
		if key.AddrPort().Addr() == netip.MustParseAddr(ip) {
			m.frontends[key] = id
			pool := m.pinned.Frontends.Get(id).PoolId
			m.pools[pool] = m.pinned.Pools.Get(pool)
		}
	}
	for _, id := range backendIDs(t, s, m.pinned, "web") {
		m.backends[id], _ = m.pinned.BackendOf(id)
	}

	return m
}

// mustWork waits until every client reaches all backends, and verify finds nothing wrong.
func (m *tampered) mustWork(t *testing.T) {
	t.Helper()
	for _, c := range m.Clients() {
		scene.MustReach(t, c.To("tcp", m.address), m.names...)
	}
	lab.Eventually(t, "nothing is wrong", func() bool {
		_, err := m.Agent.Run("verify")

		return err == nil
	})
}

// putBack writes what was there.
func (m *tampered) putBack(t *testing.T) {
	t.Helper()
	for id, backend := range m.backends {
		lab.Must(t, m.pinned.Backends.Put(maps.Index(id), backend))
	}
	for id, pool := range m.pools {
		lab.Must(t, m.pinned.Pools.Put(id, pool))
	}
	for key, id := range m.frontends {
		lab.Must(t, m.pinned.FrontendIDs.Put(key, id))
	}
}

// Another program writes into the maps. `sluice verify` reports what is wrong, and the
// agent corrects it at its next comparison by itself.
func TestTampering(t *testing.T) {
	t.Parallel()
	m := mustTamper(t)
	tests := []struct {
		name   string
		tamper func(t *testing.T)
		drift  string // in `sluice verify`
	}{
		{"a frontend is deleted", func(t *testing.T) {
			for key := range m.frontends {
				lab.Must(t, m.pinned.FrontendIDs.Delete(key))
			}
		}, "is not programmed"},
		{"a backend leads astray", func(t *testing.T) {
			for id, backend := range m.backends {
				backend.Addr = maps.AddrOf(netip.MustParseAddr("192.0.2.1"))
				lab.Must(t, m.pinned.Backends.Put(maps.Index(id), backend))
			}
		}, "192.0.2.1"},
		{"backends are deleted", func(t *testing.T) {
			for id := range m.backends {
				lab.Must(t, m.pinned.Backends.Put(maps.Index(id), maps.Backend{}))
			}
		}, m.Objects.Namespace + "/web"},
		{"a pool has no slots", func(t *testing.T) {
			for id, pool := range m.pools {
				pool.SlotCount = 0
				lab.Must(t, m.pinned.Pools.Put(id, pool))
			}
		}, m.Objects.Namespace + "/web"},
	}
	for _, test := range tests {
		t.Run("found: "+test.name, func(t *testing.T) {
			test.tamper(t)
			if out, err := m.Agent.Run("verify"); err == nil || !strings.Contains(out, test.drift) {
				t.Errorf("verify prints %q, %v, want %q", out, err, test.drift)
			}
			m.putBack(t)
			m.mustWork(t)
		})
	}
	sluice.MustRestart(t, m.Agent, "--config-sync-period", "1s")
	for _, test := range tests {
		t.Run("mended: "+test.name, func(t *testing.T) {
			lab.Must(t, unix.Kill(m.Agent.PID(), unix.SIGSTOP)) // or it might be faster than we look
			test.tamper(t)
			_, err := m.Pod.To("tcp", m.address).Ask()
			lab.Must(t, unix.Kill(m.Agent.PID(), unix.SIGCONT))
			if err == nil {
				t.Error("the agent has not noticed")
			}
			m.mustWork(t)
		})
	}
}
