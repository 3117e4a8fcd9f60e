package e2e

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/kube"
	"github.com/sluice-lb/sluice/pkg/reconcile"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// A Service's annotation selects how its backends are chosen. It changes while
// connections are open and others begin, and none of them breaks.
//
//	pod-1-0, node-1 ── web:80 ─┬─ pod-1-1, pod-1-2
//	                           └─ pod-2-0, pod-2-1, pod-2-2
func TestAlgorithmAnnotation(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "web", readyAll(s.pods()...)...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, names(s.pods()...)...)
	pinned := mustLoad(t, s.agent)
	open := mustOpen(t, s.pod, ip)
	load := mustDial(t, 50, dial{s.pod, "tcp", ip}, dial{s.node, "udp", ip})

	for _, test := range []struct {
		annotation string
		is         string
	}{
		{"rr", "rr"}, {"lc", "lc"}, {"sed", "sed"}, {"nq", "nq"}, {"sh", "sh"}, {"dh", "dh"}, {"maglev", "maglev"},
		{"weighted", "random"}, {"", "random"}, {"sh", "sh"}, {"random", "random"},
	} {
		s.changeService(t, "web", func(svc *corev1.Service) {
			svc.Annotations = map[string]string{kube.AlgorithmAnnotation: test.annotation}
		})
		eventually(t, fmt.Sprintf("all addresses have the algorithm %s", test.is), func() bool {
			return hasAlgorithm(t, pinned, s.namespace+"/web", test.is)
		})
		switch d := (dial{s.pod, "tcp", ip}); test.is {
		case "sh", "dh":
			d.mustKeep(t)
		case "rr", "maglev", "random": // the others avoid the backend with the most open connections
			mustReach(t, d, names(s.pods()...)...)
		}
		if bad, problems := test.annotation != test.is, s.mustShow(t, "web").Problems; bad != (len(problems) > 0) {
			t.Errorf("%q: problems are %v", test.annotation, problems)
		}
	}
	load.mustHaveWorked(t)
	open.mustAnswer(t)
}

// mustKeep checks that a client reaches the same backend each time.
func (d dial) mustKeep(t testing.TB) {
	t.Helper()
	var first string
	for i := range 12 {
		name, err := d.ask()
		must(t, err)
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
	ports := mustRead(t, pinned.ServicePorts)
	found := 0
	for key, id := range mustRead(t, pinned.FrontendIDs) {
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
func (s *scene) mustShow(t testing.TB, name string) agent.Service {
	t.Helper()
	services, err := s.agent.Services()
	must(t, err)
	for _, svc := range services {
		if svc.Name == s.namespace+"/"+name {
			return svc
		}
	}
	t.Fatalf("Service %s is not shown", name)

	return agent.Service{}
}

// connections returns how many connections the backends of a Service have, as verbs
// show it: with an agent, or without.
func (s *scene) connections(t testing.TB, pinned *maps.Pinned, name string) int {
	t.Helper()
	services, err := s.agent.Services()
	if err != nil {
		services, err = agent.ProgrammedServices(pinned.Tables)
	}
	must(t, err)
	n := 0
	for _, svc := range services {
		if svc.Name != s.namespace+"/"+name {
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
func mustOpen(t testing.TB, from *lab.Caller, address string) *openSockets {
	t.Helper()
	o := new(openSockets)
	for i := range 15 {
		network := "tcp4"
		if i >= 10 {
			network = "udp4"
		}
		socket, err := from.Socket(network)
		must(t, err)
		must(t, socket.Connect(address))
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
		must(t, socket.Close())
	}
	o.sockets, o.names = o.sockets[n:], o.names[n:]
}

// How many connections a backend has is known, also after an end of the agent
// meanwhile, and of its backends.
//
//	pod-1-0 ── web:80 ─┬─ pod-1-1, pod-1-2
//	                   └─ pod-2-0, goes in the end
func TestConnectionsAcrossRestarts(t *testing.T) {
	s := mustScene(t)
	leaves := s.remote()[0]
	s.setEndpoints(t, "web", readyAll(append(s.local(), leaves)...)...)
	ip := at(s.createService(t, "web").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "tcp", ip}, names(append(s.local(), leaves)...)...)
	pinned := mustLoad(t, s.agent)
	mustHave := func(n int, when string) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d connections %s", n, when), func() bool { return s.connections(t, pinned, "web") == n })
	}
	mustHave(0, "at first")
	open := mustOpen(t, s.pod, ip)
	mustHave(15, "when they were opened")
	must(t, s.agent.Kill())
	mustHave(15, "without an agent")
	open.mustClose(t, 4)
	more := mustOpen(t, s.pod, ip)
	mustHave(11+15, "when some closed and others were opened without an agent")
	must(t, s.agent.Start())
	sluice.MustWait(t, s.agent)
	mustHave(11+15, "with the next agent")
	more.mustClose(t, 15)
	mustHave(11, "when the new ones were closed")

	s.setEndpoints(t, "web", readyAll(s.local()...)...)
	mustReach(t, dial{s.pod, "tcp", ip}, names(s.local()...)...)
	open.mustClose(t, len(open.sockets))
	mustHave(0, "when all were closed")
}
