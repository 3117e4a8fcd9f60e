package e2e

import (
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
	"github.com/sluice-lb/sluice/test/sluice"
)

// An agent starts while the API server is away. It does all that needs none: it
// attaches to devices that have come, and a hook that was detached, now and later;
// it has programmed the node's new addresses, and node ports answer where they did. When the
// API server is back, it applies the changes since then.
//
//	node-2 ── node port of node-1 ──────────────────┬─ pod-1-0
//	a new pod, meanwhile, past the hooks ────── web ┘
func TestStartWithoutAPIServer(t *testing.T) {
	t.Parallel() // it waits for the agent's next check, 30 s
	s := mustTestbed(t)
	before, after, self := s.Local()[0], s.Local()[1], s.Lab.Nodes[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(before)...)
	web := s.CreateService(t, "web", balancer)
	clusterIP, nodePort := scene.At(web.Spec.ClusterIPs[0], 80), scene.At(self.IPv4.String(), web.Spec.Ports[0].NodePort)
	outside := scene.MustClientIn(t, "outside", s.Lab.Nodes[1].Namespace, nil)
	scene.MustReach(t, s.Node.To("tcp", clusterIP), before.Name)
	scene.MustReach(t, outside.To("tcp", nodePort), before.Name)
	connect4 := filepath.Join(s.Agent.BPFRoot(), "links", "connect4")

	lab.Must(t, s.Agent.Kill())
	s.Tunnel.Cut()
	pod, err := self.AddPod()
	lab.Must(t, err)
	newer := netip.MustParsePrefix("192.168.50.77/24")
	lab.Must(t, self.AddAddress("eth0", newer))
	lab.Must(t, detachLink(connect4), s.Agent.Start())

	lab.Eventually(t, "the new pod's device is attached", func() bool {
		state, err := s.Agent.Status()
		return err == nil && slices.ContainsFunc(state.Devices, func(d datapath.DeviceState) bool {
			return d.Name == pod.Device && d.Class == "pods" && d.Attached != "" && d.Problem == ""
		})
	})
	hooksWork := func() bool {
		status, err := s.Agent.Status()
		hasProblem := func(h datapath.HookState) bool { return h.Problem != "" }

		return err == nil && status.Running && status.Effective == "" && !slices.ContainsFunc(status.Hooks, hasProblem)
	}
	lab.Eventually(t, "hooks take effect", hooksWork)
	pinned := sluice.MustLoad(t, s.Agent)
	lab.Eventually(t, "the node's new address is known", func() bool {
		return sluice.MustRead(t, pinned.Addrs)[maps.AddrOf(newer.Addr())].Flags == maps.AddrNode
	})
	guest := scene.MustClientIn(t, "guest", pod.Namespace, nil)
	scene.MustReach(t, s.Node.To("tcp", clusterIP), before.Name)
	scene.MustReach(t, guest.To("tcp", clusterIP), before.Name)
	scene.MustReach(t, outside.To("tcp", nodePort), before.Name)
	if status, err := s.Agent.Status(); err != nil || status.Synced || status.Well() {
		t.Errorf("without the API server the agent reports that all is well: %+v, %v", status, err)
	}

	lab.Must(t, detachLink(connect4))
	lab.EventuallyIn(t, 45*time.Second, "the hook is attached again", hooksWork)
	scene.MustReach(t, s.Node.To("tcp", clusterIP), before.Name)

	s.Tunnel.Mend(t)
	s.SetEndpoints(t, "web", scene.ReadyAll(after)...)
	mustReachAfterOutage(t, guest.To("tcp", clusterIP), after.Name)
	scene.MustReach(t, outside.To("tcp", nodePort), after.Name)
	lab.EventuallyIn(t, watchRetry, "all is well", func() bool {
		status, err := s.Agent.Status()
		return err == nil && status.Well()
	})
}

// detachLink detaches a pinned link, as another program might.
func detachLink(pin string) error {
	pinned, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return err
	}
	defer pinned.Close()

	return pinned.Detach()
}
