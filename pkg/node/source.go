package node

import (
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// isSource reports whether the kernel may select the address as a source: it is a
// primary one of global scope, usable and not deprecated.
func isSource(ip netip.Addr, addr netlink.Addr) bool {
	// The flag of a temporary IPv6 address is that of a secondary IPv4 address.
	const unwanted = unix.IFA_F_DEPRECATED | unix.IFA_F_TEMPORARY

	return isUsable(addr.Flags) && addr.Flags&unwanted == 0 &&
		addr.Scope == unix.RT_SCOPE_UNIVERSE && !ip.IsLinkLocalUnicast() && !ip.IsLoopback()
}

// fillSources sets the source addresses of devices without an address as the kernel
// selects them: that of the default route, or else the first of any device.
func fillSources(devices []Device, at map[int]int, routes []netlink.Route) {
	v4, v6 := defaultSource(devices, at, routes, false), defaultSource(devices, at, routes, true)
	for _, d := range devices {
		v4, v6 = firstValid(v4, d.SourceV4), firstValid(v6, d.SourceV6)
	}
	for i := range devices {
		d := &devices[i]
		d.SourceV4, d.SourceV6 = firstValid(d.SourceV4, v4), firstValid(d.SourceV6, v6)
	}
}

func firstValid(a, b netip.Addr) netip.Addr {
	if a.IsValid() {
		return a
	}

	return b
}

// defaultSource returns the source address of the default route of a family: the
// one that the route names, or that of its device.
func defaultSource(devices []Device, at map[int]int, routes []netlink.Route, v6 bool) netip.Addr {
	var best *netlink.Route
	for i := range routes {
		route := &routes[i]
		if isDefault(route, v6) && (best == nil || route.Priority < best.Priority) {
			best = route
		}
	}
	if best == nil {
		return netip.Addr{}
	}
	if named, ok := netip.AddrFromSlice(best.Src); ok {
		return named.Unmap()
	}
	i, ok := at[hopsOf([]netlink.Route{*best})[0].index]
	if !ok {
		return netip.Addr{}
	}
	if v6 {
		return devices[i].SourceV6
	}

	return devices[i].SourceV4
}

func isDefault(route *netlink.Route, v6 bool) bool {
	if route.Type != unix.RTN_UNICAST || (route.Family == unix.AF_INET6) != v6 {
		return false
	}
	if route.Dst == nil {
		return true
	}
	bits, _ := route.Dst.Mask.Size()

	return bits == 0
}
