package node

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Route is where packets to a prefix leave a network namespace.
type Route struct {
	To     netip.Prefix
	Device string // empty if there is none (blackhole)
}

// Routes returns the routes of the main table of the calling thread's network namespace. The prefix of a default
// route has no bits.
func Routes() ([]Route, error) {
	links, err := Complete(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("devices: %w", err)
	}
	names := make(map[int]string, len(links))
	for _, link := range links {
		names[link.Attrs().Index] = link.Attrs().Name
	}
	var routes []Route
	for family, any := range map[int]netip.Addr{unix.AF_INET: netip.IPv4Unspecified(), unix.AF_INET6: netip.IPv6Unspecified()} {
		listed, err := Complete(func() ([]netlink.Route, error) { return netlink.RouteList(nil, family) })
		if err != nil {
			return nil, fmt.Errorf("routes: %w", err)
		}
		for _, r := range listed {
			to := netip.PrefixFrom(any, 0)
			if r.Dst != nil {
				addr, _ := netip.AddrFromSlice(r.Dst.IP)
				bits, _ := r.Dst.Mask.Size()
				to = netip.PrefixFrom(addr.Unmap(), bits)
			}
			routes = append(routes, Route{to, names[r.LinkIndex]})
		}
	}

	return routes, nil
}
