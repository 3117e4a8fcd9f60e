package devices

import (
	"testing"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestBulk sends 32 MiB each way as fast as it goes, through everything that
// changes what a packet is on its way through the hooks: 64 KiB that are cut late
// or never, packets as they are on the wire, packets joined on arrival, checksums
// that are there and that are not.
//
//	client ══ node port ══┬══ pod-1-1
//	                      └══ vxlan0 ══ pod-2-0
func TestBulk(t *testing.T) {
	t.Parallel()
	const size = 32 << 20
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	c.local.port, c.remote.port = bulkPort, bulkPort
	w.start(t, c.local, c.remote)
	w.mustSwallow(t)

	for _, test := range []struct {
		name string
		off  []lab.Offload
		f    family
	}{
		{"with all offloads", nil, ipv4},
		{"with all offloads", nil, ipv6},
		{"without GRO", []lab.Offload{lab.EarlyCoalescing}, ipv4},
		{"without TSO", []lab.Offload{lab.Segmentation}, ipv6},
		{"without TSO, GSO and GRO", []lab.Offload{lab.Segmentation, lab.LateSplitting, lab.EarlyCoalescing}, ipv6},
		{"with real checksums", []lab.Offload{lab.Checksums}, ipv4},
		{"without anything", []lab.Offload{lab.Checksums, lab.Segmentation, lab.LateSplitting, lab.EarlyCoalescing}, ipv6},
	} {
		t.Run(test.name+", "+test.f.String(), func(t *testing.T) {
			for offload := range lab.EarlyCoalescing + 1 {
				w.mustOffload(t, offload, true)
			}
			for _, offload := range test.off {
				w.mustOffload(t, offload, false)
			}
			for _, to := range []service{c.local, c.remote} {
				up, down, err := transfer(w.Client.Namespace, to.at(nodePort, test.f, w.Nodes[0]), size, size)
				if err != nil {
					t.Errorf("%s: %v", to.backends[0].name, err)
				}
				t.Logf("%s: %.1f Gbit/s up, %.1f down", to.backends[0].name, up*8e-9, down*8e-9)
			}
		})
	}
}
