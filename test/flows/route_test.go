package flows

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Of either family, by [familyIndex].
var (
	everywhere = [...]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

	// Devices here have no addresses of a common subnet: a neighbour that is
	// known for good stands for the other end of a veth pair.
	gateways = [...]netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}
)

func familyIndex(ip netip.Addr) int {
	if ip.Is4() {
		return 0
	}

	return 1
}

// lead routes a prefix from one end of a veth pair to the other. Preferred is
// the source address of what is sent, unless it is zero.
func lead(from, to lab.End, prefix netip.Prefix, preferred netip.Addr) error {
	device, err := from.Namespace.Netlink().LinkByName(from.Device)
	if err != nil {
		return fmt.Errorf("route to %s: %w", prefix, err)
	}
	peer, err := to.Namespace.Netlink().LinkByName(to.Device)
	if err != nil {
		return fmt.Errorf("route to %s: %w", prefix, err)
	}
	gateway := gateways[familyIndex(prefix.Addr())]
	neighbour := &netlink.Neigh{
		LinkIndex:    device.Attrs().Index,
		State:        unix.NUD_PERMANENT,
		IP:           gateway.AsSlice(),
		HardwareAddr: peer.Attrs().HardwareAddr,
	}
	route := &netlink.Route{
		LinkIndex: device.Attrs().Index,
		Dst:       &net.IPNet{IP: prefix.Masked().Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())},
		Gw:        gateway.AsSlice(),
		Src:       preferred.AsSlice(),
		Flags:     int(netlink.FLAG_ONLINK),
	}
	err = from.Namespace.Netlink().NeighSet(neighbour)
	if err == nil {
		err = from.Namespace.Netlink().RouteReplace(route)
	}
	if err != nil {
		return fmt.Errorf("route to %s by %s: %w", prefix, from.Device, err)
	}

	return nil
}

// single is the prefix of one address.
func single(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }
