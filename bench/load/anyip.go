package load

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Own makes all addresses of a prefix the namespace's own (AnyIP), as
//
//	ip route add local 100.64.0.0/12 dev lo
//
// does: servers on the wildcard address answer at each of them. Others need a
// route to there.
func Own(ns *lab.Namespace, prefix netip.Prefix) error {
	lo, err := ns.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo of %s: %w", ns.Name(), err)
	}
	route := &netlink.Route{
		Dst: &net.IPNet{
			IP:   prefix.Addr().AsSlice(),
			Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
		},
		LinkIndex: lo.Attrs().Index,
		Type:      unix.RTN_LOCAL,
		Table:     unix.RT_TABLE_LOCAL,
		Scope:     unix.RT_SCOPE_HOST,
	}
	if err := ns.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("own %s in %s: %w", prefix, ns.Name(), err)
	}

	return nil
}
