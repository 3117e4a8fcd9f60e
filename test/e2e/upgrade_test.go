package e2e

import (
	"math/rand/v2"
	"os"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent is replaced by a build with another version of all maps, which is killed some times
// as it starts, and that by the first one again. No client notices: not those that dial 600 connections and 300
// UDP flows a second, no connection and no UDP flow that is open, and no client that has a
// backend to keep gets another.
//
//	outside ── node port of node-1 ─┬─ pod-1-1, pod-1-2
//	pod-1-0, node-1 ── web:80 ──────┴─ pod-2-0, pod-2-1, pod-2-2
func TestAnotherLayout(t *testing.T) {
	s := mustScene(t)
	outside := lab.MustCaller(t, s.lab.Nodes[1].Namespace, nil)
	nodePort := func(spec *corev1.ServiceSpec) { spec.Type = corev1.ServiceTypeNodePort }
	at := func(svc *corev1.Service) (clusterIP, port string) {
		return at(svc.Spec.ClusterIPs[0], 80), at(s.lab.Nodes[0].IPv4.String(), svc.Spec.Ports[0].NodePort)
	}
	// Ids are those of a node with a past.
	s.setEndpoints(t, "gone", readyAll(s.local()...)...)
	gone, _ := at(s.createService(t, "gone"))
	mustReach(t, dial{s.pod, "tcp", gone}, names(s.local()...)...)
	for _, name := range []string{"web", "sticky"} {
		s.setEndpoints(t, name, readyAll(s.remote()...)...)
	}
	web, webPort := at(s.createService(t, "web", nodePort, samePorts(30080)))
	sticky, stickyPort := at(s.createService(t, "sticky", nodePort, samePorts(30081), func(spec *corev1.ServiceSpec) {
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}))
	mustReach(t, dial{s.pod, "tcp", web}, names(s.remote()...)...)
	s.deleteService(t, "gone")
	for _, name := range []string{"web", "sticky"} {
		s.setEndpoints(t, name, readyAll(s.pods()...)...)
	}
	for _, network := range []string{"tcp", "udp"} {
		mustReach(t, dial{s.pod, network, web}, names(s.pods()...)...)
		mustReach(t, dial{outside, network, webPort}, names(s.pods()...)...)
	}

	binary := s.agent.Binary()
	other, err := sluice.BuildOtherLayout(t.TempDir())
	must(t, err)
	idsBefore := mustDump(t, mustLoad(t, s.agent))
	kept := mustKeep(t, map[*lab.Caller][2]string{s.pod: {web, sticky}, s.node: {web, sticky}, outside: {webPort, stickyPort}})
	load := mustDial(t, 200, dial{s.pod, "tcp", web}, dial{s.node, "tcp", web}, dial{outside, "tcp", webPort})
	datagrams := mustDial(t, 100, dial{s.pod, "udp", web}, dial{s.node, "udp", web}, dial{outside, "udp", webPort})
	for _, test := range []struct{ name, binary, folder, state string }{
		{"upgrade", other, "v3x", "state-v2x"},
		{"downgrade", binary, maps.Version, maps.StateVersion},
		{"upgrade again", other, "v3x", "state-v2x"},
		{"downgrade again", binary, maps.Version, maps.StateVersion},
	} {
		must(t, s.agent.Stop())
		time.Sleep(200 * time.Millisecond) // without an agent
		s.agent.SetBinary(test.binary)
		for range 3 { // killed at any moment of its start
			must(t, s.agent.Start())
			time.Sleep(rand.N(500 * time.Millisecond))
			must(t, s.agent.Kill())
		}
		must(t, s.agent.Start())
		sluice.MustWait(t, s.agent)
		kept.check(t, test.name)
		time.Sleep(time.Second) // what was retired is gone
		kept.check(t, test.name+", a second later")
		mustHaveFolders(t, s.agent.BPFRoot(), "links", "programs", test.state, test.folder)
	}
	load.mustHaveWorked(t)
	datagrams.mustHaveWorked(t)

	idsAfter := mustDump(t, mustLoad(t, s.agent))
	if diff := gocmp.Diff(idsBefore.Ports, idsAfter.Ports); diff != "" {
		t.Errorf("service ports are not as before (-before +after):\n%s", diff)
	}
	if diff := gocmp.Diff(idsBefore.Backends, idsAfter.Backends); diff != "" {
		t.Errorf("backends are not as before (-before +after):\n%s", diff)
	}
}

// samePorts gives TCP and UDP the same node port.
func samePorts(port int32) func(*corev1.ServiceSpec) {
	return func(spec *corev1.ServiceSpec) {
		for i := range spec.Ports {
			spec.Ports[i].NodePort = port
		}
	}
}

// keptBackends are questions, with the backend that has answered each so far.
type keptBackends []keptBackend

type keptBackend struct {
	what string
	ask  func(testing.TB) string
	was  string
}

// mustKeep has clients open connections and UDP flows to one Service, and get affinity to
// another: where each dials them.
func mustKeep(t testing.TB, clients map[*lab.Caller][2]string) keptBackends {
	t.Helper()
	var kept keptBackends
	keep := func(what string, ask func(testing.TB) string) {
		kept = append(kept, keptBackend{what, ask, ask(t)})
	}
	for from, addresses := range clients {
		web, sticky := addresses[0], addresses[1]
		for range 10 {
			tcp, err := from.Socket("tcp4")
			must(t, err)
			must(t, tcp.Connect(web))
			keep("a connection to "+web, func(t testing.TB) string { return mustAsk(t, tcp) })
			udp := mustConnect(t, from, web)
			keep("a connected UDP socket to "+web, func(t testing.TB) string { return mustAsk(t, udp) })
			loose, err := from.Socket("udp4")
			must(t, err)
			keep("an unconnected UDP socket to "+web, func(t testing.TB) string { return mustAskAt(t, loose, web) })
			for _, network := range []string{"tcp", "udp"} {
				keep("affinity to "+sticky+"/"+network, func(t testing.TB) string {
					name, err := dial{from, network, sticky}.ask()
					must(t, err)

					return name
				})
			}
		}
	}
	kept.check(t, "before")

	return kept
}

// check asks all again.
func (kept keptBackends) check(t testing.TB, when string) {
	t.Helper()
	for _, k := range kept {
		if now := k.ask(t); now != k.was {
			t.Errorf("%s: %s is answered by %s, was by %s", when, k.what, now, k.was)
		}
	}
}

// mustHaveFolders compares what is below a bpf root.
func mustHaveFolders(t testing.TB, root string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(root)
	must(t, err)
	var have []string
	for _, entry := range entries {
		have = append(have, entry.Name())
	}
	if diff := gocmp.Diff(want, have); diff != "" {
		t.Errorf("folders of pins (-want +have):\n%s", diff)
	}
}
