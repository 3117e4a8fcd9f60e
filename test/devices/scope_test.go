package devices

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestPodsOfOtherNodes has a pod of node-2 dial node ports of node-1, at the
// address that node-1 has among its pods, which a pod reaches with its own. There
// it is a client from outside, whatever detectLocalMode makes of its address; a pod
// of node-1 is not.
//
//	pod-2-1 ── node-2 ══ node-1 ─▶ pod-1-1   policy Local, backends on both nodes
//	                     node-1 ─╳           policy Local, none on node-1
//	          pod-1-0 ── node-1 ─▶ pod-2-0   the same
func TestPodsOfOtherNodes(t *testing.T) {
	const tunnel, segment = 1450, 0
	for _, test := range []struct {
		name       string
		attachment lab.Attachment
		overlayMTU int
		agent      []string
	}{
		{"by device, by the segment", lab.PointToPoint, segment, nil},
		{"by device, by a tunnel", lab.Bridged, tunnel, nil},
		{"ClusterCIDR, by the segment", lab.Bridged, segment,
			[]string{"--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}},
		{"ClusterCIDR, by a tunnel", lab.PointToPoint, tunnel,
			[]string{"--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48"}},
		{"NodeCIDR, by the segment", lab.PointToPoint, segment, []string{"--detect-local-mode=NodeCIDR"}},
		{"BridgeInterface, by a tunnel", lab.Bridged, tunnel,
			[]string{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=br0"}},
		{"InterfaceNamePrefix, by a tunnel", lab.PointToPoint, tunnel,
			[]string{"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=pod"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := mustWorld(t, setting{
				Config: lab.Config{Attachment: test.attachment, OverlayMTU: test.overlayMTU},
				filter: bridgeCNI,
				agent:  append(test.agent, "--nodeport-addresses=10.244.0.0/16,fd00:10:244::/48"),
			})
			w.mustBeStrict(t)
			w.publishNodes(t)
			c := casesOf(w)
			w.start(t, c.local, c.remote, c.keeps, c.elsewhere)

			first, second := w.Nodes[0], w.Nodes[1]
			podElsewhere, podHere := w.optedOut(t, second.Pods[1]), w.optedOut(t, first.Pods[0])
			ofElsewhere, ofHere := podIPs(second.Pods[1]), podIPs(first.Pods[0])
			silent := [2]netip.Addr{}
			for _, dial := range []struct {
				name    string
				from    *lab.Caller
				to      service
				backend string // "": silence
				seen    [2]netip.Addr
			}{
				{"pod of node-2, policy Local", podElsewhere, c.keeps, "pod-1-1", ofElsewhere},
				{"pod of node-2, policy Local without a backend on node-1", podElsewhere, c.elsewhere, "", silent},
				{"pod of node-2, backend on node-1", podElsewhere, c.local, "pod-1-1", ofElsewhere},
				{"pod of node-2, backend on node-2", podElsewhere, c.remote, "pod-2-0", sourcesTo(t, first, onPod(second.Pods[0]))},
				{"pod of node-1, policy Local without a backend on node-1", podHere, c.elsewhere, "pod-2-0", ofHere},
			} {
				v := dialTest{from: dial.from, backend: dial.backend, seen: dial.seen, errno: unix.ETIMEDOUT}
				for _, f := range families {
					// The gateway of its pods.
					address := netip.AddrPortFrom(first.PodCIDRs[f].Addr().Next(), dial.to.nodePort())
					for range 4 { // or chance may choose the backend on node-1
						for _, network := range networks {
							if err := v.dial(w, network, address.String(), f); err != nil {
								t.Errorf("%s, %s, %s: %v", dial.name, f, network, err)
							}
						}
					}
				}
			}
		})
	}
}

// publishNodes makes the lab's nodes known to the agents, with their podCIDRs.
func (w *world) publishNodes(t *testing.T) {
	t.Helper()
	text := ""
	for _, node := range w.Nodes {
		text += fmt.Sprintf("---\napiVersion: v1\nkind: Node\nmetadata: {name: %s}\nspec: {podCIDRs: [%q, %q]}\n"+
			"status: {addresses: [{type: InternalIP, address: %q}, {type: InternalIP, address: %q}]}\n",
			node.Name, node.PodCIDRs[0].Masked(), node.PodCIDRs[1].Masked(), node.IPv4, node.IPv6)
	}
	lab.Must(t, os.WriteFile(filepath.Join(w.manifests, "nodes.yaml"), []byte(text), 0o644))
}
