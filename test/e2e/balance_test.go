package e2e

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/pkg/status"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// A Service's annotation selects how its backends are chosen. It changes while
// connections are open and others begin, and none of them breaks.
//
//	pod, node-1 ────── web:80 ─┬─ pod-1-0 to pod-1-2
//	                           └─ pod-2-0, pod-2-1, pod-2-2
func TestAlgorithmAnnotation(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(s.pods()...)...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), scene.Names(s.pods()...)...)
	pinned := sluice.MustLoad(t, s.Agent)
	open := mustOpen(t, s.Pod, ip)
	load := scene.MustDial(t, 50, s.Pod.To("tcp", ip), s.Node.To("udp", ip))

	for _, test := range []struct {
		annotation string
		is         string
	}{
		{"rr", "rr"}, {"lc", "lc"}, {"sed", "sed"}, {"nq", "nq"}, {"sh", "sh"}, {"dh", "dh"}, {"maglev", "maglev"},
		{"weighted", "random"}, {"", "random"}, {"sh", "sh"}, {"random", "random"},
	} {
		s.ChangeService(t, "web", func(svc *corev1.Service) {
			svc.Annotations = map[string]string{kube.AlgorithmAnnotation: test.annotation}
		})
		lab.Eventually(t, fmt.Sprintf("all addresses have the algorithm %s", test.is), func() bool {
			return hasAlgorithm(t, pinned, s.Namespace+"/web", test.is)
		})
		switch d := s.Pod.To("tcp", ip); test.is {
		case "sh", "dh":
			mustKeepBackend(t, d)
		case "rr", "maglev", "random": // the others avoid the backend with the most open connections
			scene.MustReach(t, d, scene.Names(s.pods()...)...)
		}
		if bad, problems := test.annotation != test.is, s.mustShow(t, "web").Problems; bad != (len(problems) > 0) {
			t.Errorf("%q: problems are %v", test.annotation, problems)
		}
	}
	load.MustKeepUp(t)
	open.mustAnswer(t)
}

// mustKeepBackend checks that a client reaches the same backend each time.
func mustKeepBackend(t testing.TB, d scene.Dial) {
	t.Helper()
	var first string
	for i := range 12 {
		name := d.MustAsk(t).Name
		if i == 0 {
			first = name
		}
		if name != first {
			t.Fatalf("%s: %s answers, and %s before", d, name, first)
		}
	}
}

// hasAlgorithm reports whether all frontends of a Service have an algorithm, catch-alls
// left out.
func hasAlgorithm(t testing.TB, pinned *maps.Pinned, service, algorithm string) bool {
	t.Helper()
	ports := sluice.MustRead(t, pinned.ServicePorts)
	found := 0
	for key, id := range sluice.MustRead(t, pinned.FrontendIDs) {
		pool := pinned.Pools.Get(pinned.Frontends.Get(id).PoolId)
		if key.Port == 0 || !strings.HasPrefix(ports[pool.ServicePortId].String(), service+":") {
			continue
		}
		if reconcile.AlgorithmText(pool.Algorithm) != algorithm {
			return false
		}
		found++
	}

	return found > 0
}

// mustShow returns what the agent shows of a Service.
func (s *testbed) mustShow(t testing.TB, name string) status.Service {
	t.Helper()
	services, err := s.Agent.Services()
	lab.Must(t, err)
	for _, svc := range services {
		if svc.Name == s.Namespace+"/"+name {
			return svc
		}
	}
	t.Fatalf("Service %s is not shown", name)

	return status.Service{}
}

// connections returns how many connections the backends of a Service have, as verbs
// show it: with an agent, or without.
func (s *testbed) connections(t testing.TB, pinned *maps.Pinned, name string) int {
	t.Helper()
	services, err := s.Agent.Services()
	if err != nil {
		services, err = status.ProgrammedServices(pinned.Tables)
	}
	lab.Must(t, err)
	n := 0
	for _, svc := range services {
		if svc.Name != s.Namespace+"/"+name {
			continue
		}
		for _, port := range svc.Ports {
			for _, b := range port.Backends {
				n += b.Connections
			}
		}
	}

	return n
}

// openSockets are connections that stay open, with the pod that answers each.
type openSockets struct {
	sockets []*lab.Socket
	names   []string
}

// mustOpen opens ten TCP connections and five UDP sockets.
func mustOpen(t testing.TB, from *scene.Client, address string) *openSockets {
	t.Helper()
	o := new(openSockets)
	for i := range 15 {
		network := "tcp4"
		if i >= 10 {
			network = "udp4"
		}
		socket, err := from.Socket(network)
		lab.Must(t, err)
		lab.Must(t, socket.Connect(address))
		o.sockets = append(o.sockets, socket)
		o.names = append(o.names, mustAsk(t, socket))
	}

	return o
}

// mustAnswer checks that the same pods answer as before.
func (o *openSockets) mustAnswer(t testing.TB) {
	t.Helper()
	for i, socket := range o.sockets {
		if name := mustAsk(t, socket); name != o.names[i] {
			t.Errorf("%s answers, and %s before", name, o.names[i])
		}
	}
}

// mustClose closes n of them.
func (o *openSockets) mustClose(t testing.TB, n int) {
	t.Helper()
	for _, socket := range o.sockets[:n] {
		lab.Must(t, socket.Close())
	}
	o.sockets, o.names = o.sockets[n:], o.names[n:]
}

// The numbers of connections of backends stay right when the agent restarts, and when
// backends end.
//
//	pod ────── web:80 ─┬─ pod-1-0 to pod-1-2
//	                   └─ pod-2-0, goes in the end
func TestConnectionsAcrossRestarts(t *testing.T) {
	s := mustTestbed(t)
	leaves := s.Remote()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(append(s.Local(), leaves)...)...)
	ip := scene.At(s.CreateService(t, "web").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("tcp", ip), scene.Names(append(s.Local(), leaves)...)...)
	pinned := sluice.MustLoad(t, s.Agent)
	mustHave := func(n int, when string) {
		t.Helper()
		lab.Eventually(t, fmt.Sprintf("%d connections %s", n, when), func() bool { return s.connections(t, pinned, "web") == n })
	}
	mustHave(0, "at first")
	open := mustOpen(t, s.Pod, ip)
	mustHave(15, "when they were opened")
	lab.Must(t, s.Agent.Kill())
	mustHave(15, "without an agent")
	open.mustClose(t, 4)
	more := mustOpen(t, s.Pod, ip)
	mustHave(11+15, "when some closed and others were opened without an agent")
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)
	mustHave(11+15, "with the next agent")
	more.mustClose(t, 15)
	mustHave(11, "when the new ones were closed")

	s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()...)...)
	scene.MustReach(t, s.Pod.To("tcp", ip), scene.Names(s.Local()...)...)
	open.mustClose(t, len(open.sockets))
	mustHave(0, "when all were closed")
}
