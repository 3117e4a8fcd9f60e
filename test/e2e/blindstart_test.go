package e2e

import (
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/agent"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
)

// An agent starts while the API server is away. It does all that needs none: it
// attaches to devices that have come, and a hook that was detached, now and later;
// it has programmed the node's new addresses, and node ports answer where they did. When the
// API server is back, it goes on as if nothing had been.
//
//	node-2 ── node port of node-1 ──────────────────┬─ pod-1-1
//	pod-1-3, comes meanwhile, past the hooks ── web ┘
func TestStartWithoutAPIServer(t *testing.T) {
	t.Parallel() // it waits for the agent's next check, 30 s
	s := mustScene(t)
	before, after, self := s.local()[0], s.local()[1], s.lab.Nodes[0]
	s.setEndpoints(t, "web", readyAll(before)...)
	web := s.createService(t, "web", balancer)
	clusterIP, nodePort := at(web.Spec.ClusterIPs[0], 80), at(self.IPv4.String(), web.Spec.Ports[0].NodePort)
	outside := lab.MustCaller(t, s.lab.Nodes[1].Namespace, nil)
	mustReach(t, dial{s.node, "tcp", clusterIP}, before.Name)
	mustReach(t, dial{outside, "tcp", nodePort}, before.Name)
	connect4 := filepath.Join(s.agent.BPFRoot(), "links", "connect4")

	must(t, s.agent.Kill())
	s.tunnel.Cut()
	pod, err := self.AddPod()
	must(t, err)
	newer := netip.MustParsePrefix("192.168.50.77/24")
	must(t, self.AddAddress("eth0", newer))
	must(t, detachLink(connect4), s.agent.Start())

	eventually(t, "the new pod's device is attached", func() bool {
		status, err := s.agent.Status()
		return err == nil && slices.ContainsFunc(status.Devices, func(d agent.Device) bool {
			return d.Name == pod.Device && d.Class == "pods" && d.Attached != "" && d.Problem == ""
		})
	})
	hooksWork := func() bool {
		status, err := s.agent.Status()
		hasProblem := func(h datapath.HookState) bool { return h.Problem != "" }

		return err == nil && status.Running && status.Effective == "" && !slices.ContainsFunc(status.Hooks, hasProblem)
	}
	eventually(t, "hooks take effect", hooksWork)
	pinned := mustLoad(t, s.agent)
	eventually(t, "the node's new address is known", func() bool {
		return mustRead(t, pinned.Addrs)[maps.AddrOf(newer.Addr())].Flags == maps.AddrNode
	})
	guest := lab.MustCaller(t, pod.Namespace, nil)
	mustReach(t, dial{s.node, "tcp", clusterIP}, before.Name)
	mustReach(t, dial{guest, "tcp", clusterIP}, before.Name)
	mustReach(t, dial{outside, "tcp", nodePort}, before.Name)
	if status, err := s.agent.Status(); err != nil || status.Synced || status.Well() {
		t.Errorf("without the API server the agent reports that all is well: %+v, %v", status, err)
	}

	must(t, detachLink(connect4))
	eventuallyIn(t, 45*time.Second, "the hook is attached again", hooksWork)
	mustReach(t, dial{s.node, "tcp", clusterIP}, before.Name)

	s.tunnel.Mend(t)
	s.setEndpoints(t, "web", readyAll(after)...)
	mustReachAfterOutage(t, dial{guest, "tcp", clusterIP}, after.Name)
	mustReach(t, dial{outside, "tcp", nodePort}, after.Name)
	if status, err := s.agent.Status(); err != nil || !status.Well() {
		t.Errorf("all is not well: %+v, %v", status, err)
	}
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
