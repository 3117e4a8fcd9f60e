package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	overlayDevice = "vxlan0"
	overlayPort   = 8472
)

// addOverlay gives the node a VXLAN device as flannel does: its address is the
// first one of the node's pods, 10.244.n.0, and it learns nothing.
func (n *Node) addOverlay(mtu int) error {
	vxlan := &netlink.Vxlan{
		LinkAttrs: netlink.NewLinkAttrs(),
		VxlanId:   1,
		SrcAddr:   n.IPv4.AsSlice(),
		Port:      overlayPort,
	}
	vxlan.Name, vxlan.MTU, vxlan.HardwareAddr = overlayDevice, mtu, n.overlayMAC()
	if err := n.handle.LinkAdd(vxlan); err != nil {
		return fmt.Errorf("%s of %s: %w", overlayDevice, n.Name, err)
	}

	return End{Namespace: n.Namespace, Device: overlayDevice, Addresses: singles(n.OverlayIPs()...)}.setUp()
}

// OverlayIPs are the node's addresses in the overlay, one of each family: what
// it sends to other nodes' pods comes from there.
func (n *Node) OverlayIPs() []netip.Addr {
	return []netip.Addr{n.PodCIDRs[0].Addr(), n.PodCIDRs[1].Addr()}
}

func (n *Node) overlayMAC() net.HardwareAddr {
	return net.HardwareAddr{2, 0, 10, 244, byte(n.Number), 0}
}

// addTunnelTo leads to another node's pods through the overlay: a route, the
// other device's MAC address, and the node that it is on.
func (n *Node) addTunnelTo(other *Node) error {
	return n.onLink(overlayDevice, func(link netlink.Link) error {
		index := link.Attrs().Index
		err := n.handle.NeighSet(&netlink.Neigh{
			LinkIndex:    index,
			Family:       unix.AF_BRIDGE,
			State:        netlink.NUD_PERMANENT,
			Flags:        netlink.NTF_SELF,
			HardwareAddr: other.overlayMAC(),
			IP:           other.IPv4.AsSlice(),
		})
		for i, gateway := range other.OverlayIPs() {
			err = errors.Join(err,
				n.handle.NeighSet(&netlink.Neigh{
					LinkIndex:    index,
					State:        netlink.NUD_PERMANENT,
					HardwareAddr: other.overlayMAC(),
					IP:           gateway.AsSlice(),
				}),
				n.handle.RouteReplace(&netlink.Route{
					Dst:       ipNet(other.PodCIDRs[i]),
					Gw:        gateway.AsSlice(),
					LinkIndex: index,
					Flags:     int(netlink.FLAG_ONLINK),
				}),
			)
		}

		return err
	})
}
