package devices

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestSCTP goes through an association, packet by packet. netfilter, which has
// SCTP, checks every packet on the way, and so do the ends.
//
//	client ── node port, load balancer ─┬─ pod-1-1
//	                                    └─ pod-2-0, masqueraded
func TestSCTP(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	w.start(t, c.local, c.remote)
	pods := []*lab.Pod{w.Nodes[0].Pods[1], w.Nodes[1].Pods[0]}
	seen := [][2]netip.Addr{hostIPs(w.Client), sourcesTo(t, w.Nodes[0], c.remote.backends[0])}

	for i, to := range []service{c.local, c.remote} {
		for _, f := range families {
			server := lab.MustSCTP(t, pods[i].Namespace, podIPs(pods[i])[f], podPort)
			go server.Serve()
			client := lab.MustSCTP(t, w.Client.Namespace, hostIPs(w.Client)[f], uint16(4000+10*i+int(f)))
			for _, way := range []way{nodePort, loadBalancer} {
				t.Run(fmt.Sprintf("%s, %s of %s", f, way, pods[i].Name), func(t *testing.T) {
					saw, err := client.Associate(netip.MustParseAddrPort(to.at(way, f, w.Nodes[0])), dialTimeout)
					lab.Must(t, err)
					if saw != seen[i][f].String() {
						t.Errorf("the server saw %s, want %s", saw, seen[i][f])
					}
				})
			}
		}
	}
}
