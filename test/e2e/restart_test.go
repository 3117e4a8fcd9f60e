package e2e

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent goes and comes back in every way there is, and no client notices:
// three dial 600 new connections and 200 UDP flows a second between them. What
// is in the maps stays, ids included, which are not those of a fresh start.
//
//	two clients in a pod, one on node-1 ── web:80 ─┬─ pod-1-0 to pod-1-2
//	                                                 └─ pod-2-0, pod-2-1, pod-2-2
func TestRestart(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.Remote()...)...)
	web := s.CreateService(t, "web")
	v4, v6 := scene.At(web.Spec.ClusterIPs[0], 80), scene.At(web.Spec.ClusterIPs[1], 80)
	scene.MustReach(t, s.Pod.To("tcp", v4), scene.Names(s.Remote()...)...)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	s.SetEndpoints(t, "another", scene.ReadyAll(s.Local()...)...)
	another := s.CreateService(t, "another")
	scene.MustReach(t, s.Pod.To("tcp", scene.At(another.Spec.ClusterIPs[0], 80)), scene.Names(s.Local()...)...)
	scene.MustReach(t, s.Pod.To("tcp", v4), scene.Names(s.pods()...)...)
	scene.MustReach(t, s.Pod.To("tcp", v6), scene.Names(s.pods()...)...)
	newer, err := sluice.Build(t.TempDir(), "newer")
	lab.Must(t, err)
	pinned := sluice.MustLoad(t, s.Agent)
	second := scene.MustClientIn(t, "another", s.Pod.Namespace, s.Cgroup)

	for _, test := range []struct {
		name    string
		restart func(t *testing.T, agent *sluice.Node)
	}{
		{"killed, and started after 2 s", func(t *testing.T, agent *sluice.Node) {
			lab.Must(t, agent.Kill())
			time.Sleep(2 * time.Second)
			lab.Must(t, agent.Start())
		}},
		{"killed, and started at once", func(t *testing.T, agent *sluice.Node) {
			lab.Must(t, agent.Kill(), agent.Start())
		}},
		{"killed at any moment of its start", func(t *testing.T, agent *sluice.Node) {
			for range 8 {
				lab.Must(t, agent.Kill(), agent.Start())
				time.Sleep(rand.N(300 * time.Millisecond))
			}
			lab.Must(t, agent.Kill(), agent.Start())
		}},
		{"stopped, and a newer build started", func(t *testing.T, agent *sluice.Node) {
			lab.Must(t, agent.Stop())
			agent.SetBinary(newer)
			lab.Must(t, agent.Start())
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := mustDump(t, pinned)
			load := scene.MustDial(t, 200, s.Pod.To("tcp", v4), s.Node.To("tcp", v4), second.To("tcp", v6))
			datagrams := scene.MustDial(t, 100, second.To("udp", v4), s.Node.To("udp", v6))
			time.Sleep(100 * time.Millisecond)
			test.restart(t, s.Agent)
			sluice.MustWait(t, s.Agent)
			time.Sleep(time.Second) // what was retired is gone
			load.MustKeepUp(t)
			datagrams.MustKeepUp(t)
			mustEqual(t, mustDump(t, pinned), before)
		})
	}
	if status, err := s.Agent.Status(); err != nil || status.Version != "newer" {
		t.Errorf("the agent's version is %q, %v, want newer", status.Version, err)
	}
}

// The next agent applies what has changed while none was running.
//
//	web:80 ─┬─ pod-1-0, goes meanwhile  gone:80, goes meanwhile ── pod-1-0
//	        ├─ pod-1-1
//	        └─ pod-2-0, comes meanwhile
func TestChangesWhileDead(t *testing.T) {
	s := mustTestbed(t)
	leaves, stays, comes := s.Local()[0], s.Local()[1], s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(leaves, stays)...)
	s.SetEndpoints(t, "gone", scene.ReadyAll(leaves)...)
	web := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	gone := scene.At(s.CreateService(t, "gone").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", web), scene.Names(leaves, stays)...)
	scene.MustReach(t, s.Pod.To("tcp", gone), scene.Names(leaves)...)
	pinned := sluice.MustLoad(t, s.Agent)
	keeps := backendIDs(t, pinned, stays)
	connected := mustConnect(t, s.Pod, gone)

	lab.Must(t, s.Agent.Kill())
	s.SetEndpoints(t, "web", scene.ReadyAll(stays, comes)...)
	s.DeleteService(t, "gone")
	scene.MustReach(t, s.Pod.To("tcp", web), scene.Names(leaves, stays)...) // as last known
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)

	scene.MustReach(t, s.Pod.To("tcp", web), scene.Names(stays, comes)...)
	scene.MustFail(t, s.Pod.To("tcp", gone), scene.Dropped)
	mustBeUnanswered(t, connected)
	if now := backendIDs(t, pinned, stays); !slices.Equal(now, keeps) {
		t.Errorf("the ids of the backend that stayed are %v, were %v", now, keeps)
	}
	lab.Eventually(t, "the deleted Service leaves no trace in the maps", func() bool {
		return !mentions(mustDump(t, pinned), s.Namespace+"/gone") && len(backendIDs(t, pinned, leaves)) == 0
	})
}

// An agent is killed when it has taken a UDP Service out of the maps, and before it has found the sockets of its
// clients. The next one does it.
//
//	pod ────── dns:80 ── pod-1-0
func TestKilledBeforeSocketsWereFound(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "dns", scene.ReadyAll(s.Local()[0])...)
	dns := s.CreateService(t, "dns")
	ip := scene.At(dns.Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("udp", ip), s.Local()[0].Name)
	connected := mustConnect(t, s.Pod, ip)
	lab.Must(t, s.Agent.Kill())

	s.DeleteService(t, "dns")
	pinned := sluice.MustLoad(t, s.Agent)
	for key := range sluice.MustRead(t, pinned.FrontendIDs) {
		if slices.Contains(dns.Spec.ClusterIPs, key.AddrPort().Addr().String()) {
			lab.Must(t, pinned.FrontendIDs.Delete(key))
		}
	}
	for id := range mustReadBackends(t, pinned) {
		lab.Must(t, pinned.Backends.Put(maps.Index(id), maps.Backend{}))
	}
	lab.Must(t, s.Agent.Start())
	mustBeUnanswered(t, connected)
}

// backendIDs are the ids that a pod has in the backends map, sorted.
func backendIDs(t testing.TB, pinned *maps.Pinned, pod *lab.Pod) []uint32 {
	t.Helper()
	var ids []uint32
	for id, backend := range mustReadBackends(t, pinned) {
		if addr := backend.AddrPort().Addr(); addr == pod.IPv4 || addr == pod.IPv6 {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)

	return ids
}

// mentions reports whether a Service has a port in the maps.
func mentions(d dump, service string) bool {
	for _, port := range d.Ports {
		if strings.HasPrefix(port.String(), service+":") {
			return true
		}
	}

	return false
}
