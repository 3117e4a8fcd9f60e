package e2e

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent is replaced by a build with another version of all maps, which is killed some times
// as it starts, and that by the first one again. No client notices: not those that dial 600 connections and 300
// UDP flows a second, no connection and no UDP flow that is open, and no client that has a
// backend to keep gets another.
//
//	outside ── node port of node-1 ─┬─ pod-1-0 to pod-1-2
//	pod, node-1 ────── web:80 ──────┴─ pod-2-0, pod-2-1, pod-2-2
func TestAnotherLayout(t *testing.T) {
	s := mustTestbed(t)
	outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
	nodePort := scene.NodePort
	addressesOf := func(svc *corev1.Service) (clusterIP, port string) {
		return scene.At(svc.Spec.ClusterIPs[0], 80), scene.At(s.Lab.Nodes[0].IPv4.String(), svc.Spec.Ports[0].NodePort)
	}
	// Ids are those of a node with a past.
	s.SetEndpoints(t, "gone", scene.ReadyAll(s.Local()...)...)
	gone, _ := addressesOf(s.CreateService(t, "gone"))
	scene.MustReach(t, s.Pod.To("tcp", gone), scene.Names(s.Local()...)...)
	for _, name := range []string{"web", "sticky"} {
		s.SetEndpoints(t, name, scene.ReadyAll(s.Remote()...)...)
	}
	web, webPort := addressesOf(s.CreateService(t, "web", nodePort, samePorts(30080)))
	sticky, stickyPort := addressesOf(s.CreateService(t, "sticky", nodePort, samePorts(30081), func(svc *corev1.Service) {
		svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}))
	scene.MustReach(t, s.Pod.To("tcp", web), scene.Names(s.Remote()...)...)
	s.DeleteService(t, "gone")
	for _, name := range []string{"web", "sticky"} {
		s.SetEndpoints(t, name, scene.ReadyAll(s.pods()...)...)
	}
	for _, network := range []string{"tcp", "udp"} {
		scene.MustReach(t, s.Pod.To(network, web), scene.Names(s.pods()...)...)
		scene.MustReach(t, outside.To(network, webPort), scene.Names(s.pods()...)...)
	}

	binary := s.Agent.Binary()
	other, err := sluice.BuildOtherLayout(t.TempDir())
	lab.Must(t, err)
	idsBefore := mustDump(t, sluice.MustLoad(t, s.Agent))
	kept := mustKeep(t, map[*scene.Client][2]string{s.Pod: {web, sticky}, s.Node: {web, sticky}, outside: {webPort, stickyPort}})
	load := scene.MustDial(t, 200, s.Pod.To("tcp", web), s.Node.To("tcp", web), outside.To("tcp", webPort))
	datagrams := scene.MustDial(t, 100, s.Pod.To("udp", web), s.Node.To("udp", web), outside.To("udp", webPort))
	for _, test := range []struct{ name, binary, folder, state string }{
		{"upgrade", other, "v3x", "state-v2x"},
		{"downgrade", binary, maps.Version, maps.StateVersion},
		{"upgrade again", other, "v3x", "state-v2x"},
		{"downgrade again", binary, maps.Version, maps.StateVersion},
	} {
		lab.Must(t, s.Agent.Stop())
		time.Sleep(200 * time.Millisecond) // without an agent
		s.Agent.SetBinary(test.binary)
		for range 3 { // killed at any moment of its start
			lab.Must(t, s.Agent.Start())
			time.Sleep(rand.N(500 * time.Millisecond))
			lab.Must(t, s.Agent.Kill())
		}
		lab.Must(t, s.Agent.Start())
		sluice.MustWait(t, s.Agent)
		kept.check(t, test.name)
		time.Sleep(time.Second) // what was retired is gone
		kept.check(t, test.name+", a second later")
		mustHaveFolders(t, s.Agent.BPFRoot(), "links", "programs", test.state, test.folder)
	}
	load.MustKeepUp(t)
	datagrams.MustKeepUp(t)

	idsAfter := mustDump(t, sluice.MustLoad(t, s.Agent))
	if diff := gocmp.Diff(idsBefore.Ports, idsAfter.Ports); diff != "" {
		t.Errorf("service ports are not as before (-before +after):\n%s", diff)
	}
	if diff := gocmp.Diff(idsBefore.Backends, idsAfter.Backends); diff != "" {
		t.Errorf("backends are not as before (-before +after):\n%s", diff)
	}
}

// A downgrade fails when the programs of the other build are on the hooks, and its agent follows changes of Services until
// the node goes back to the first build. That inherits from the maps that were in force, though those of its own layout
// are still there: clients keep their backends, and connections count for the Services that were dialled.
func TestDowngradeThatFails(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "sticky", scene.ReadyAll(s.pods()...)...)
	sticky := s.CreateService(t, "sticky", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
	at := scene.At(sticky.Spec.ClusterIPs[0], 80)
	answers := func(d scene.Dial) func() bool {
		return func() bool { _, err := d.Ask(); return err == nil }
	}
	lab.Eventually(t, "sticky is programmed", answers(s.Pod.To("tcp", at)))

	binary := s.Agent.Binary()
	other, err := sluice.BuildOtherLayout(t.TempDir())
	lab.Must(t, err)
	lab.Must(t, s.Agent.Stop())
	// What cannot be read among the links keeps any build from finishing.
	blocker := filepath.Join(s.Agent.BPFRoot(), "links", "blocker")
	pinned, err := ebpf.LoadPinnedMap(maps.PinOf(s.Agent.BPFRoot(), maps.NameFrontends), nil)
	lab.Must(t, err)
	again, err := pinned.Clone()
	lab.Must(t, err)
	t.Cleanup(func() { _ = os.Remove(blocker) }) // if the test ends early
	lab.Must(t, again.Pin(blocker), again.Close(), pinned.Close())
	s.Agent.SetBinary(other)
	lab.Must(t, s.Agent.Start())
	lab.EventuallyIn(t, 30*time.Second, "the other build fails", func() bool {
		return strings.Contains(s.Agent.Log(), "not attached; trying again")
	})
	// Ids that only the other build gives: of Services that are there, and of a client's backend.
	s.DeleteService(t, "sticky")
	s.SetEndpoints(t, "late", scene.ReadyAll(s.pods()...)...)
	late := s.CreateService(t, "late", func(svc *corev1.Service) { svc.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
	s.SetEndpoints(t, "idle", scene.ReadyAll(s.pods()...)...)
	s.CreateService(t, "idle")
	lateAt := scene.At(late.Spec.ClusterIPs[0], 80)
	var kept keptBackends
	for _, from := range []*scene.Client{s.Pod, s.Node} {
		for _, network := range []string{"tcp", "udp"} {
			ask := func(t testing.TB) string { return from.To(network, lateAt).MustAsk(t).Name }
			lab.Eventually(t, "late is programmed", answers(from.To(network, lateAt)))
			kept = append(kept, keptBackend{"affinity to late/" + network, ask, ask(t)})
		}
	}
	lab.Must(t, s.Agent.Kill(), os.Remove(blocker))

	s.Agent.SetBinary(binary)
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)
	kept.check(t, "after going back")
	pinnedMaps := sluice.MustLoad(t, s.Agent)
	for e, err := range pinnedMaps.Stats.All() {
		lab.Must(t, err)
		port, _, err := pinnedMaps.ServicePorts.Lookup(e.Key.ServicePortId)
		lab.Must(t, err)
		if _, name, _ := port.Parts(); name == "idle" {
			t.Errorf("%d are counted for %v, which no client has dialled: %+v", e.Value, port, e.Key)
		}
	}
}

// A node goes down to a build that knows no tracepoints, and up again, while clients dial. Before that build is done it ends
// links that it does not know, and it is done. No exchange fails, and open connections go on.
//
// No release exists to go down to, so the older build is this tree with the sweep of builds before tracepoints. What
// else differs in a real older build, such as layouts of maps, is not shown here; TestAnotherLayout has that.
//
//	pod, node, outside ── web:80, node port ─┬─ pod-1-0 to pod-1-2
//	                                         └─ pod-2-0 to pod-2-2
func TestDowngradeToAnOlderBuild(t *testing.T) {
	older, err := sluice.BuildOldSweep(t.TempDir())
	lab.Must(t, err)
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	web := s.CreateService(t, "web", scene.NodePort)
	at := scene.At(web.Spec.ClusterIPs[0], 80)
	nodePort := scene.At(s.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
	dials := []scene.Dial{s.Pod.To("tcp", at), s.Node.To("tcp", at), s.Outside.To("tcp", nodePort)}
	var open []*scene.Connection
	for _, d := range dials {
		scene.MustReach(t, d, scene.Names(s.pods()...)...)
		for range 5 {
			open = append(open, d.MustOpen(t))
		}
	}
	load := scene.MustDial(t, 50, dials...)
	today := s.Agent.Binary()
	for _, binary := range []string{older, today, older, today} {
		lab.Must(t, s.Agent.Stop())
		s.Agent.SetBinary(binary)
		s.Agent.SetArgs()
		if binary == older {
			s.Agent.SetArgs(sluice.OldSweepArgs...)
		}
		lab.Must(t, s.Agent.Start())
		sluice.MustWait(t, s.Agent)
		if log := s.Agent.Log(); strings.Contains(log, "not attached; trying again") {
			t.Fatalf("%s does not get done:\n%s", binary, log)
		}
		scene.MustGoOn(t, open...)
		if binary == today {
			mustHaveFolders(t, filepath.Join(s.Agent.BPFRoot(), "links", "trace"), "inet_sock_set_state", "tcp_retransmit_skb")
		}
	}
	load.MustHaveWorked(t)
}

// samePorts gives TCP and UDP the same node port.
func samePorts(port int32) scene.Change {
	return func(svc *corev1.Service) {
		for i := range svc.Spec.Ports {
			svc.Spec.Ports[i].NodePort = port
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
func mustKeep(t testing.TB, clients map[*scene.Client][2]string) keptBackends {
	t.Helper()
	var kept keptBackends
	keep := func(what string, ask func(testing.TB) string) {
		kept = append(kept, keptBackend{what, ask, ask(t)})
	}
	for from, addresses := range clients {
		web, sticky := addresses[0], addresses[1]
		for range 10 {
			tcp, err := from.Socket("tcp4")
			lab.Must(t, err)
			lab.Must(t, tcp.Connect(web))
			keep("a connection to "+web, func(t testing.TB) string { return mustAsk(t, tcp) })
			udp := mustConnect(t, from, web)
			keep("a connected UDP socket to "+web, func(t testing.TB) string { return mustAsk(t, udp) })
			loose, err := from.Socket("udp4")
			lab.Must(t, err)
			keep("an unconnected UDP socket to "+web, func(t testing.TB) string { return mustAskAt(t, loose, web) })
			for _, network := range []string{"tcp", "udp"} {
				keep("affinity to "+sticky+"/"+network, func(t testing.TB) string {
					return from.To(network, sticky).MustAsk(t).Name
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
	lab.Must(t, err)
	var have []string
	for _, entry := range entries {
		have = append(have, entry.Name())
	}
	if diff := gocmp.Diff(want, have); diff != "" {
		t.Errorf("folders of pins (-want +have):\n%s", diff)
	}
}
