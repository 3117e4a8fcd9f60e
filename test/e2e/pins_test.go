package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// The pins are removed under a running agent, which makes them again before its next check, reports that, and is then
// killed: no client notices. The next agent finds all that the first one had: connections by devices that are older
// than the loss go on.
//
//	pod, node-1 ────── web:80 ─────┬─ pod-1-0
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
			t.Parallel()
			s := mustTestbed(t)
			test.prepare(t, s.Agent)
			outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
			s.SetEndpoints(t, "web", scene.ReadyAll(s.Local()[0], s.Remote()[0])...)
			web := s.CreateService(t, "web", scene.NodePort)
			v4, v6 := scene.At(web.Spec.ClusterIPs[0], 80), scene.At(web.Spec.ClusterIPs[1], 80)
			nodePort := scene.At(s.Lab.Nodes[0].IPv4.String(), web.Spec.Ports[0].NodePort)
			scene.MustReach(t, outside.To("tcp", nodePort), s.Local()[0].Name, s.Remote()[0].Name)
			load := scene.MustDial(t, 50, s.Pod.To("tcp", v4), s.Node.To("tcp", v6), s.Pod.To("udp", v4), outside.To("tcp", nodePort))
			var open []*lab.Socket
			for range 20 {
				socket, err := outside.Socket("tcp4")
				lab.Must(t, err)
				lab.Must(t, socket.Connect(nodePort))
				mustAsk(t, socket)
				open = append(open, socket)
			}

			lab.Must(t, test.harm(s.Agent.BPFRoot()))
			began := time.Now()
			lab.Eventually(t, "all is pinned again", func() error {
				pinned, err := maps.Load(s.Agent.BPFRoot())
				if err != nil {
					return err
				}
				links, err := filepath.Glob(filepath.Join(s.Agent.BPFRoot(), "links", "trace", "*"))
				if len(links) < 2 {
					err = errors.Join(err, fmt.Errorf("of tracepoints, %v are pinned", links))
				}

				return errors.Join(err, pinned.Close())
			})
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("it took %v, as long as without being told", took)
			}
			time.Sleep(time.Second) // what is pinned last
			lab.Must(t, s.Agent.Kill())
			mustHaveFolders(t, filepath.Join(s.Agent.BPFRoot(), "links", "trace"), "inet_sock_set_state", "tcp_retransmit_skb")
			time.Sleep(time.Second) // the kernel takes its time to detach what has no reference
			lab.Must(t, s.Agent.Start())
			sluice.MustWait(t, s.Agent)
			for _, socket := range open {
				mustAsk(t, socket)
			}
			if !strings.Contains(s.Agent.Log(), "pins were missing; made again") {
				t.Error("the log does not report it")
			}
			load.MustKeepUp(t)
		})
	}
}

// Where no bpffs is left, nothing can be pinned. That is reported, and nothing else
// suffers: new devices are attached, hooks stay effective, and the node stays
// healthy for load balancers and the kubelet. When bpffs is back, so are the pins.
//
//	node-2 ── node port of node-1 ── pod-1-0
//	a new pod, meanwhile, past the hooks ────── web:80
func TestWithoutBPFFS(t *testing.T) {
	t.Parallel() // it waits for the agent's next check, 30 s
	s := mustTestbed(t)
	// A node is unhealthy after twice the period.
	s.Agent.SetArgs("--proxy-mode=iptables", "--iptables-sync-period=2s", "--healthz-bind-address=0.0.0.0:10256")
	mustMount(t, s.Agent, "tmpfs", "bpf")
	self, server := s.Lab.Nodes[0], s.Local()[0]
	outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
	s.SetEndpoints(t, "web", scene.ReadyAll(server)...)
	web := s.CreateService(t, "web", scene.NodePort)
	clusterIP, nodePort := scene.At(web.Spec.ClusterIPs[0], 80), scene.At(self.IPv4.String(), web.Spec.Ports[0].NodePort)
	scene.MustReach(t, outside.To("tcp", nodePort), server.Name)
	load := scene.MustDial(t, 50, s.Pod.To("tcp", clusterIP), outside.To("tcp", nodePort))

	lab.Must(t, unmount(s.Agent.BPFRoot()))
	pod, err := self.AddPod()
	lab.Must(t, err)
	guest := scene.MustClientIn(t, "guest", pod.Namespace, nil)
	scene.MustReach(t, guest.To("tcp", clusterIP), server.Name)
	lab.EventuallyIn(t, 45*time.Second, "the agent knows that nothing can be pinned", func() bool {
		status, err := s.Agent.Status()

		return err == nil && strings.Contains(status.Unpinned, "not on a bpf file system")
	})
	s.mustSeeEvent(t, "default", s.NodeName(self), "PinsMissing", "cannot be made")
	if status, err := s.Agent.Status(); err != nil || status.Well() || status.Effective != "" {
		t.Errorf("status is %+v, %v", status, err)
	}
	for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(time.Second) {
		for _, path := range []string{"/healthz", "/livez"} {
			mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), 10256), path, 200)
		}
		mustAnswer(t, of(s.Node), scene.At(self.IPv4.String(), 10256), "/readyz", 503, "pins are missing")
	}

	lab.Must(t, unix.Mount("bpf", s.Agent.BPFRoot(), "bpf", 0, ""))
	s.mustSeeEvent(t, "default", s.NodeName(self), "PinsMadeAgain", "are made again")
	sluice.MustWait(t, s.Agent)
	lab.Must(t, s.Agent.Kill())
	time.Sleep(time.Second) // the kernel takes its time to detach what has no reference
	lab.Must(t, s.Agent.Start())
	sluice.MustWait(t, s.Agent)
	load.MustKeepUp(t)
}

// mustMount mounts file systems at a node's bpf root, one above the other, and starts
// its agent anew.
func mustMount(t *testing.T, agent *sluice.Node, kinds ...string) {
	t.Helper()
	lab.Must(t, agent.Stop())
	if _, err := agent.Run("cleanup"); err != nil {
		t.Fatal(err)
	}
	lab.Must(t, os.Mkdir(agent.BPFRoot(), 0o700))
	for _, kind := range kinds {
		if err := unix.Mount(kind, agent.BPFRoot(), kind, 0, ""); err != nil {
			t.Fatalf("mount of %s at %s: %v", kind, agent.BPFRoot(), err)
		}
		t.Cleanup(func() { _ = unmount(agent.BPFRoot()) }) // unless the test has
	}
	lab.Must(t, agent.Start())
	sluice.MustWait(t, agent)
}

func unmount(path string) error { return unix.Unmount(path, unix.MNT_DETACH) }
