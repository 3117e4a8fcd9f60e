package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The pins go under a running agent: no client notices, the agent makes them again
// and reports it. The next agent finds all that the first one had: connections by devices
// that are older than the loss go on.
//
//	pod-1-0, node-1 ── web:80 ─────┬─ pod-1-1
//	node-2 ── node port of node-1 ─┴─ pod-2-0
func TestPinsAreLost(t *testing.T) {
	for _, test := range []struct {
		name    string
		prepare func(t *testing.T, agent *sluice.Node)
		harm    func(bpfRoot string) error
	}{
		{"removed", func(*testing.T, *sluice.Node) {}, os.RemoveAll},
		{"unmounted", func(t *testing.T, agent *sluice.Node) { mustMount(t, agent, "bpf") }, unmount},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel() // it waits for the agent's next check, 30 s
			s := mustScene(t)
			test.prepare(t, s.agent)
			outside := lab.MustCaller(t, s.lab.Nodes[1].Namespace, nil)
			s.setEndpoints(t, "web", readyAll(s.local()[0], s.remote()[0])...)
			web := s.createService(t, "web", func(spec *corev1.ServiceSpec) { spec.Type = corev1.ServiceTypeNodePort })
			v4, v6 := at(web.Spec.ClusterIPs[0], 80), at(web.Spec.ClusterIPs[1], 80)
			nodePort := at(s.lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
			mustReach(t, dial{outside, "tcp", nodePort}, s.local()[0].Name, s.remote()[0].Name)
			load := mustDial(t, 50, dial{s.pod, "tcp", v4}, dial{s.node, "tcp", v6}, dial{s.pod, "udp", v4}, dial{outside, "tcp", nodePort})
			var open []*lab.Socket
			for range 10 {
				socket, err := outside.Socket("tcp4")
				must(t, err)
				must(t, socket.Connect(nodePort))
				mustAsk(t, socket)
				open = append(open, socket)
			}

			must(t, test.harm(s.agent.BPFRoot()))
			connect4 := filepath.Join(s.agent.BPFRoot(), "links", "connect4")
			eventuallyIn(t, 45*time.Second, "a link is pinned again", func() bool {
				_, err := os.Stat(connect4)
				return err == nil
			})
			s.mustSeeEvent(t, "default", s.nodeName(s.lab.Nodes[0]), "PinsMadeAgain", "are made again")
			pinned, err := maps.Load(s.agent.BPFRoot())
			if err != nil {
				t.Fatalf("maps are not pinned again: %v", err)
			}
			defer pinned.Close()
			if status, err := s.agent.Status(); err != nil || !status.Well() {
				t.Errorf("all is not well: %+v, %v", status, err)
			}

			must(t, s.agent.Kill())
			time.Sleep(time.Second) // the kernel takes its time to detach what has no reference
			must(t, s.agent.Start())
			sluice.MustWait(t, s.agent)
			for _, socket := range open {
				mustAsk(t, socket)
			}
			load.mustHaveWorked(t)
		})
	}
}

// Where no bpffs is left, nothing can be pinned. That is reported, and nothing else
// suffers: new devices are attached, hooks stay effective, and neither load balancers
// nor the kubelet turn away from the node. When bpffs is back, so are the pins.
//
//	node-2 ── node port of node-1 ── pod-1-1
//	pod-1-3, comes meanwhile, past the hooks ── web:80
func TestWithoutBPFFS(t *testing.T) {
	t.Parallel() // it waits for the agent's next check, 30 s
	s := mustScene(t)
	// A node is unhealthy after twice the period.
	s.agent.SetArgs("--proxy-mode=iptables", "--iptables-sync-period=2s", "--healthz-bind-address=0.0.0.0:10256")
	mustMount(t, s.agent, "tmpfs", "bpf")
	self, server := s.lab.Nodes[0], s.local()[0]
	outside := lab.MustCaller(t, s.lab.Nodes[1].Namespace, nil)
	s.setEndpoints(t, "web", readyAll(server)...)
	web := s.createService(t, "web", func(spec *corev1.ServiceSpec) { spec.Type = corev1.ServiceTypeNodePort })
	clusterIP, nodePort := at(web.Spec.ClusterIPs[0], 80), at(self.IPv4.String(), web.Spec.Ports[0].NodePort)
	mustReach(t, dial{outside, "tcp", nodePort}, server.Name)
	load := mustDial(t, 50, dial{s.pod, "tcp", clusterIP}, dial{outside, "tcp", nodePort})

	must(t, unmount(s.agent.BPFRoot()))
	pod, err := self.AddPod()
	must(t, err)
	guest := lab.MustCaller(t, pod.Namespace, nil)
	mustReach(t, dial{guest, "tcp", clusterIP}, server.Name)
	eventuallyIn(t, 45*time.Second, "the agent knows that nothing can be pinned", func() bool {
		status, err := s.agent.Status()

		return err == nil && strings.Contains(status.Unpinned, "not on a bpf file system")
	})
	s.mustSeeEvent(t, "default", s.nodeName(self), "PinsMissing", "cannot be made")
	if status, err := s.agent.Status(); err != nil || status.Well() || status.Effective != "" {
		t.Errorf("status is %+v, %v", status, err)
	}
	for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(time.Second) {
		for _, path := range []string{"/healthz", "/livez"} {
			mustAnswer(t, of(s.node), at(self.IPv4.String(), 10256), path, 200)
		}
		mustAnswer(t, of(s.node), at(self.IPv4.String(), 10256), "/readyz", 503, "pins are missing")
	}

	must(t, unix.Mount("bpf", s.agent.BPFRoot(), "bpf", 0, ""))
	s.mustSeeEvent(t, "default", s.nodeName(self), "PinsMadeAgain", "are made again")
	sluice.MustWait(t, s.agent)
	must(t, s.agent.Kill())
	time.Sleep(time.Second) // the kernel takes its time to detach what has no reference
	must(t, s.agent.Start())
	sluice.MustWait(t, s.agent)
	load.mustHaveWorked(t)
}

// mustMount mounts file systems at a node's bpf root, one above the other, and starts
// its agent anew.
func mustMount(t *testing.T, agent *sluice.Node, kinds ...string) {
	t.Helper()
	must(t, agent.Stop())
	if _, err := agent.Run("cleanup"); err != nil {
		t.Fatal(err)
	}
	must(t, os.Mkdir(agent.BPFRoot(), 0o700))
	for _, kind := range kinds {
		if err := unix.Mount(kind, agent.BPFRoot(), kind, 0, ""); err != nil {
			t.Fatalf("mount of %s at %s: %v", kind, agent.BPFRoot(), err)
		}
		t.Cleanup(func() { _ = unmount(agent.BPFRoot()) }) // unless the test has
	}
	must(t, agent.Start())
	sluice.MustWait(t, agent)
}

func unmount(path string) error { return unix.Unmount(path, unix.MNT_DETACH) }
