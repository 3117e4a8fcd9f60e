package devices

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestVLANs has uplinks that are VLANs: their packets pass the device below them as well.
//
//	client  eth0 ─ trunk0 ══ trunk0 ─ eth0 ┐ node-1 ─┬─ pod-1-1, node-1
//	        eth1 ─ trunk1 ══ trunk1 ─ eth1 ┘         └─ pod-2-0, node-2
func TestVLANs(t *testing.T) {
	t.Parallel()
	lab.NeedsVLANs(t)
	w := mustWorld(t, setting{
		Config: lab.Config{OverlayMTU: 1450, SecondUplink: true, Attachment: lab.Routed, VLANs: true},
		filter: openCNI,
		agent:  []string{"--devices", "trunk*=uplink,*"}, // as hardware is
	})
	far := w.leadBack(t, secondIPs)
	c := casesOf(w)
	talks := service{number: 21, backends: c.remoteHost.backends}
	w.startOn(t, 1, append(c.services(), talks)...)
	turns := false
	lab.Eventually(t, "packets need not pass the stack, if the kernel knows the MTU of routes", func() error {
		status, err := w.agents[0].Status()
		turns = status.ThroughStack == ""
		if err == nil && !turns && !strings.Contains(status.ThroughStack, "Linux 5.12") {
			err = fmt.Errorf("forwarding is %q", status.ThroughStack)
		}

		return err
	})
	caller := w.outside(t)
	t.Run("packets are turned around", func(t *testing.T) {
		for _, to := range []service{c.local, c.remote, c.remoteHost} {
			w.mustReach(t, caller, hostIPs(w.Client), to, nodePort)
		}
		for _, talk := range w.mustTalkToRemote(t, caller, talks) {
			talk.mustGoOn(t)
		}
		w.mustBeTurned(t, talks, turns)
	})
	t.Run("replies leave by the VLAN of the client", func(t *testing.T) {
		w.mustReplyTo(t, far, secondIPs, c)
	})
	t.Run("another VLAN begins nothing", func(t *testing.T) {
		w.mustNotHave(t, "stray", 77, c)
	})
}

// mustNotHave has the client dial node-1 by a VLAN that the node does not have: one Service with a backend, and one that
// would refuse.
func (w *world) mustNotHave(t *testing.T, device string, vlan int, c *cases) {
	t.Helper()
	first := w.Nodes[0]
	trunk := lab.TrunkOf("eth0")
	link, err := first.Netlink().LinkByName(trunk)
	lab.Must(t, err, w.Client.AddVLAN(trunk, device, vlan, netip.MustParsePrefix("192.168.77.100/24")))
	own, err := w.Client.Netlink().LinkByName(device)
	next := netip.MustParseAddr("192.168.77.1")
	lab.Must(t, err, w.Client.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: own.Attrs().Index, State: netlink.NUD_PERMANENT, IP: next.AsSlice(), HardwareAddr: link.Attrs().HardwareAddr,
	}))
	for _, s := range []service{c.remoteHost, c.empty} {
		lab.Must(t, w.Client.AddRoute(netip.MustParsePrefix(s.ip(clusterIP, ipv4)+"/32"), next))
		conn, err := w.Client.Dial("udp", s.at(clusterIP, ipv4, first), dialTimeout)
		lab.Must(t, err)
		defer conn.Close()
		for range 3 {
			_, err := conn.Write([]byte("name\n"))
			lab.Must(t, err, conn.SetReadDeadline(time.Now().Add(300*time.Millisecond)))
			if _, err := conn.Read(make([]byte, 64)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s answers by a VLAN that the node does not have: %v", s.name(), err)
			}
		}
	}
	text, err := w.agents[0].Run("flows", "-o", "json")
	lab.Must(t, err)
	if strings.Contains(text, "192.168.77.100") {
		t.Errorf("flows of a VLAN that the node does not have: %s", text)
	}
}
