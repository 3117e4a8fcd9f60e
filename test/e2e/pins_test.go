package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The pins go under a running agent: no client notices, the agent makes them again
// and tells. The next agent finds all that the first one had: connections by devices
// that are older than the loss live on.
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
		{"unmounted", mustMountOwnBPFFS, func(bpfRoot string) error { return unix.Unmount(bpfRoot, unix.MNT_DETACH) }},
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
			s.mustTell(t, "default", s.nodeName(s.lab.Nodes[0]), "PinsMissing", "are made again")
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

// mustMountOwnBPFFS gives a node a bpffs of its own, at its bpf root.
func mustMountOwnBPFFS(t *testing.T, agent *sluice.Node) {
	t.Helper()
	must(t, agent.Stop())
	if _, err := agent.Run("cleanup"); err != nil {
		t.Fatal(err)
	}
	must(t, os.Mkdir(agent.BPFRoot(), 0o700))
	if err := unix.Mount("bpf", agent.BPFRoot(), "bpf", 0, ""); err != nil {
		t.Fatal(fmt.Errorf("mount of bpffs at %s: %w", agent.BPFRoot(), err))
	}
	t.Cleanup(func() { _ = unix.Unmount(agent.BPFRoot(), unix.MNT_DETACH) }) // unless the test has
	must(t, agent.Start())
	sluice.MustWait(t, agent)
}
