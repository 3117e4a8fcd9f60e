package e2e

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent goes and comes back in every way there is, and no client notices:
// three dial 600 new connections and 200 UDP flows a second between them. What
// is in the maps stays, ids included, which are those of a node with a past.
//
//	two clients in pod-1-0, one on node-1 ── web:80 ─┬─ pod-1-1, pod-1-2
//	                                                 └─ pod-2-0, pod-2-1, pod-2-2
func TestRestart(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "web", readyAll(s.remote()...)...)
	web := s.createService(t, "web")
	v4, v6 := at(web.Spec.ClusterIPs[0], 80), at(web.Spec.ClusterIPs[1], 80)
	mustReach(t, dial{s.pod, "tcp", v4}, names(s.remote()...)...)
	s.setEndpoints(t, "web", readyAll(s.pods()...)...)
	s.setEndpoints(t, "another", readyAll(s.local()...)...)
	another := s.createService(t, "another")
	mustReach(t, dial{s.pod, "tcp", at(another.Spec.ClusterIPs[0], 80)}, names(s.local()...)...)
	mustReach(t, dial{s.pod, "tcp", v4}, names(s.pods()...)...)
	mustReach(t, dial{s.pod, "tcp", v6}, names(s.pods()...)...)
	newer, err := sluice.Build(t.TempDir(), "newer")
	if err != nil {
		t.Fatal(err)
	}
	pinned := mustLoad(t, s.agent)
	second := s.caller(t, s.lab.Nodes[0].Pods[0].Namespace)

	for _, test := range []struct {
		name    string
		restart func(t *testing.T, agent *sluice.Node)
	}{
		{"killed, and started after 2 s", func(t *testing.T, agent *sluice.Node) {
			must(t, agent.Kill())
			time.Sleep(2 * time.Second)
			must(t, agent.Start())
		}},
		{"killed, and started at once", func(t *testing.T, agent *sluice.Node) {
			must(t, agent.Kill(), agent.Start())
		}},
		{"killed at any moment of its start", func(t *testing.T, agent *sluice.Node) {
			for range 8 {
				must(t, agent.Kill(), agent.Start())
				time.Sleep(rand.N(300 * time.Millisecond))
			}
			must(t, agent.Kill(), agent.Start())
		}},
		{"stopped, and a newer build started", func(t *testing.T, agent *sluice.Node) {
			must(t, agent.Stop())
			agent.SetBinary(newer)
			must(t, agent.Start())
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := mustDump(t, pinned)
			load := mustDial(t, 200, dial{s.pod, "tcp", v4}, dial{s.node, "tcp", v4}, dial{second, "tcp", v6})
			datagrams := mustDial(t, 100, dial{second, "udp", v4}, dial{s.node, "udp", v6})
			time.Sleep(100 * time.Millisecond)
			test.restart(t, s.agent)
			sluice.MustWait(t, s.agent)
			time.Sleep(time.Second) // what was retired is gone
			load.mustHaveWorked(t)
			datagrams.mustHaveWorked(t)
			mustEqual(t, mustDump(t, pinned), before)
		})
	}
	if status, err := s.agent.Status(); err != nil || status.Version != "newer" {
		t.Errorf("the agent's version is %q, %v, want newer", status.Version, err)
	}
}

// What happens while no agent runs is made up for by the next.
//
//	web:80 ─┬─ pod-1-1, goes meanwhile  gone:80, goes meanwhile ── pod-1-1
//	        ├─ pod-1-2
//	        └─ pod-2-0, comes meanwhile
func TestChangesWhileDead(t *testing.T) {
	s := mustScene(t)
	leaves, stays, comes := s.local()[0], s.local()[1], s.remote()[0]
	s.setEndpoints(t, "web", readyAll(leaves, stays)...)
	s.setEndpoints(t, "gone", readyAll(leaves)...)
	web := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	gone := at(s.createService(t, "gone").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", web}, names(leaves, stays)...)
	mustReach(t, dial{s.pod, "tcp", gone}, names(leaves)...)
	pinned := mustLoad(t, s.agent)
	keeps := backendIDs(t, pinned, stays)
	connected := mustConnect(t, s.pod, gone)

	must(t, s.agent.Kill())
	s.setEndpoints(t, "web", readyAll(stays, comes)...)
	s.deleteService(t, "gone")
	mustReach(t, dial{s.pod, "tcp", web}, names(leaves, stays)...) // as last known
	must(t, s.agent.Start())
	sluice.MustWait(t, s.agent)

	mustReach(t, dial{s.pod, "tcp", web}, names(stays, comes)...)
	mustFail(t, dial{s.pod, "tcp", gone}, unix.EHOSTUNREACH)
	mustBeAborted(t, connected)
	if now := backendIDs(t, pinned, stays); !slices.Equal(now, keeps) {
		t.Errorf("the ids of the backend that stayed are %v, were %v", now, keeps)
	}
	eventually(t, "the deleted Service leaves no trace in the maps", func() bool {
		return !mentions(mustDump(t, pinned), s.namespace+"/gone") && len(backendIDs(t, pinned, leaves)) == 0
	})
}

// An agent is killed when it has taken a UDP Service out of the maps, and
// before it has ended the sockets of its clients. The next one does it.
//
//	pod-1-0 ── dns:80 ── pod-1-1
func TestKilledBeforeSocketsWereEnded(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "dns", readyAll(s.local()[0])...)
	dns := s.createService(t, "dns")
	ip := at(dns.Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "udp", ip}, s.local()[0].Name)
	connected := mustConnect(t, s.pod, ip)
	must(t, s.agent.Kill())

	s.deleteService(t, "dns")
	pinned := mustLoad(t, s.agent)
	for key := range mustRead(t, pinned.FrontendIDs) {
		if slices.Contains(dns.Spec.ClusterIPs, key.AddrPort().Addr().String()) {
			must(t, pinned.FrontendIDs.Delete(key))
		}
	}
	for id := range mustReadBackends(t, pinned) {
		must(t, pinned.Backends.Clear(maps.Index(id)))
	}
	must(t, s.agent.Start())
	mustBeAborted(t, connected)
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
