package stand

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// refuse makes the namespace answer a range with ICMP unreachable.
func refuse(ns *lab.Namespace, prefix netip.Prefix) error {
	to := &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())}
	if err := ns.Netlink().RouteReplace(&netlink.Route{Dst: to, Type: unix.RTN_UNREACHABLE}); err != nil {
		return fmt.Errorf("route to %s in %s: %w", prefix, ns.Name(), err)
	}

	return nil
}
