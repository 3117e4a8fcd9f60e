package flows

import (
	"context"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/datapath"
	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/sluice"
)

// mustBeProgrammed waits until the agent is synced and has programmed this node: its addresses and
// devices come from the kernel, and not with the objects. If the Node object names
// no address, it first waits half a minute for one, as kube-proxy does. All need not
// be well: two Services that claim one address are a scenario, too.
func (d *driver) mustBeProgrammed(t *testing.T, node *sluice.Node, s *scenario) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lab.Must(t, node.WaitSynced(ctx))
	d.maps = mustMaps(t, node.BPFRoot())
	for missing := "anything"; missing != ""; {
		if ctx.Err() != nil {
			t.Fatalf("agent does not know of %s", missing)
		}
		time.Sleep(20 * time.Millisecond)
		if missing = d.unknownAddress(t, s); missing == "" {
			missing = d.unattached(t, node.BPFRoot())
		}
	}
}

// unknownAddress returns an address of the node that programs do not know yet.
func (d *driver) unknownAddress(t *testing.T, s *scenario) string {
	t.Helper()
	for _, ip := range s.Node.LocalIPs {
		use, _, err := d.maps.pinned.Addrs.Lookup(maps.AddrOf(ip))
		lab.Must(t, err)
		if use.Flags&maps.AddrNode == 0 {
			return "address " + ip.String()
		}
	}

	return ""
}

// unattached returns a device at which packets are not seen yet.
func (d *driver) unattached(t *testing.T, bpfRoot string) string {
	t.Helper()
	var states []datapath.DeviceState
	err := d.world.node.Do(func() (err error) {
		states, err = datapath.Devices(bpfRoot)
		return err
	})
	lab.Must(t, err)
	for _, state := range states {
		if state.Name != "lo" && state.Attached == "" {
			return "device " + state.Name
		}
	}

	return ""
}
