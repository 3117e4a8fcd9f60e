package e2e

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// obstacles keep an agent from attaching everything until they are removed.
var obstacles = []struct {
	name string
	args []string
	put  func(t *testing.T, ns *lab.Namespace, cgroup *lab.Cgroup) (remove func())
	log  string
}{
	// A program that bears no other on its cgroup.
	{"a hook", nil, mustOccupy, "not attached; trying again"},
	// A qdisc that leaves no room.
	{"a device", []string{"--device-attach=clsact"}, mustIngress, "not all is attached to a device"},
}

func mustOccupy(t *testing.T, _ *lab.Namespace, cgroup *lab.Cgroup) func() {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	lab.Must(t, err)
	t.Cleanup(func() { program.Close() })
	folder, err := os.Open(cgroup.Path())
	lab.Must(t, err)
	t.Cleanup(func() { folder.Close() })
	target := int(folder.Fd())
	lab.Must(t, link.RawAttachProgram(link.RawAttachProgramOptions{Target: target, Program: program, Attach: ebpf.AttachCGroupInet4Connect}))

	return func() {
		if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: target, Program: program, Attach: ebpf.AttachCGroupInet4Connect}); err != nil {
			t.Error(err)
		}
	}
}

func mustIngress(t *testing.T, ns *lab.Namespace, _ *lab.Cgroup) func() {
	t.Helper()
	uplink := lab.End{Namespace: ns, Device: "eth7", Addresses: []netip.Prefix{netip.MustParsePrefix("198.18.0.1/24")}}
	lab.MustVeth(t, uplink, lab.End{Namespace: lab.MustNamespace(t, "network"), Device: "eth0"})
	device, err := ns.Netlink().LinkByName("eth7")
	lab.Must(t, err)
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Parent: netlink.HANDLE_INGRESS}}
	lab.Must(t, ns.Netlink().QdiscAdd(qdisc))

	return func() {
		if err := ns.Netlink().QdiscDel(qdisc); err != nil {
			t.Error(err)
		}
	}
}

// With --fail-fast, an agent that cannot attach everything ends and prints why.
// Without, it goes on and attaches when it can.
func TestFailFast(t *testing.T) {
	for _, obstacle := range obstacles {
		t.Run("it minds "+obstacle.name, func(t *testing.T) {
			ns, cgroup := lab.MustNamespace(t, "node"), lab.MustCgroup(t, "e2e")
			remove := obstacle.put(t, ns, cgroup)
			node, err := sluice.NewNode(sluice.Config{
				Binary: sluice.MustBinary(t), Namespace: ns, Cgroup: cgroup, NodeName: "node-1", Manifests: t.TempDir(),
				Args: append([]string{"--fail-fast"}, obstacle.args...),
			})
			lab.Must(t, err)
			t.Cleanup(func() { node.Close() })
			lab.Must(t, node.Start())
			if end := mustEnd(t, node); !strings.Contains(end, "exit status 1") {
				t.Errorf("it ended with %s", end)
			}
			lab.Must(t, node.Kill())

			tries := strings.Count(node.Log(), obstacle.log)
			node.SetArgs(obstacle.args...)
			lab.Must(t, node.Start())
			for begin := time.Now(); strings.Count(node.Log(), obstacle.log) == tries; time.Sleep(10 * time.Millisecond) {
				if time.Since(begin) > waitTimeout {
					t.Fatalf("it does not try:\n%s", node.Log())
				}
			}
			remove()
			sluice.MustWait(t, node)
		})
	}
}

// What keeps an agent from attaching everything is no reason to restart it, which would not help: /livez stays green. The
// node is not ready, and load balancers leave it after twice the sync period. What needs nothing of what is in the way
// works: node ports are translated at devices, whatever hooks are.
//
//	outside ── node port ── pod-1-0
func TestObstaclesEndNothingElse(t *testing.T) {
	for _, obstacle := range obstacles {
		t.Run("it lives with "+obstacle.name, func(t *testing.T) {
			s := mustTestbed(t)
			server, self := s.Local()[0], s.Lab.Nodes[0]
			s.SetEndpoints(t, "web", scene.ReadyAll(server)...)
			nodePort := scene.At(self.IPv4.String(), s.CreateService(t, "web", scene.NodePort).Spec.Ports[0].NodePort)
			outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
			scene.MustReach(t, outside.To("tcp", nodePort), server.Name)
			lab.Must(t, s.Agent.Stop())
			_, err := s.Agent.Run("cleanup")
			lab.Must(t, err)
			scene.MustFail(t, outside.To("tcp", nodePort), scene.Rejected)

			remove := obstacle.put(t, self.Namespace, s.Cgroup)
			s.Agent.SetArgs(append([]string{"--proxy-mode=iptables", "--iptables-sync-period=1s", "--healthz-bind-address=127.0.0.1:10256"}, obstacle.args...)...)
			begin := time.Now()
			lab.Must(t, s.Agent.Start())
			scene.MustReach(t, outside.To("tcp", nodePort), server.Name)
			t.Logf("the node port answers %v after the start", time.Since(begin))
			mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/healthz", 503, `"healthy":false`)
			for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(500 * time.Millisecond) {
				mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/livez", 200, `"healthy":true`)
				mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/readyz", 503, `"ready":false`)
			}
			remove()
			sluice.MustWait(t, s.Agent)
			mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/healthz", 200)
			mustAnswer(t, of(s.Node), "127.0.0.1:10256", "/readyz", 200)
		})
	}
}

// mustEnd waits for the end of the agent, and returns what it ended with.
func mustEnd(t *testing.T, node *sluice.Node) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitTimeout)
	defer cancel()
	for {
		err := node.Wait(ctx)
		if err != nil && strings.Contains(err.Error(), "agent ended") {
			return err.Error()
		}
		if ctx.Err() != nil {
			t.Fatalf("the agent still runs: %v", err)
		}
	}
}
