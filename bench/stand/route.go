package stand

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

const unreachable = unix.RTN_UNREACHABLE

// own makes all addresses of a range the namespace's own.
func own(ns *lab.Namespace, prefix netip.Prefix) error {
	lo, err := ns.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	route := &netlink.Route{
		Dst:       ipNet(prefix),
		LinkIndex: lo.Attrs().Index,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     netlink.SCOPE_HOST,
	}
	if err := ns.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("own %s: %w", prefix, err)
	}

	return nil
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}
}
