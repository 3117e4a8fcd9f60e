package node

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// PassesDevice reports whether packets of the calling thread's network namespace to an address pass a device of the
// node that can send them elsewhere. They do not if the address belongs to the namespace, if there is no route, or if
// they wait for a neighbour that does not answer; and those of a pod do not if they are addressed to a neighbour, so
// that a bridge takes them there.
func PassesDevice(to netip.Addr, isNode bool) (bool, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EACCES) {
		return false, nil // none, unreachable, blackhole, prohibit
	}
	if err != nil {
		return false, fmt.Errorf("route to %s: %w", to, err)
	}
	if len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return false, nil
	}
	route := routes[0]
	if route.Gw != nil || route.Via != nil {
		return true, nil
	}
	link, err := netlink.LinkByIndex(route.LinkIndex)
	if err != nil {
		return false, fmt.Errorf("device of the route to %s: %w", to, err)
	}
	if flags := link.Attrs().RawFlags; flags&(unix.IFF_NOARP|unix.IFF_POINTOPOINT) != 0 {
		return true, nil
	}
	if !isNode {
		return false, nil
	}
	family := netlink.FAMILY_V4
	if to.Is6() {
		family = netlink.FAMILY_V6
	}
	neighbours, err := Complete(func() ([]netlink.Neigh, error) { return netlink.NeighList(route.LinkIndex, family) })
	if err != nil {
		return false, fmt.Errorf("neighbours of %s: %w", link.Attrs().Name, err)
	}
	const valid = netlink.NUD_PERMANENT | netlink.NUD_NOARP | netlink.NUD_REACHABLE | netlink.NUD_PROBE |
		netlink.NUD_STALE | netlink.NUD_DELAY
	for _, n := range neighbours {
		if ip, _ := netip.AddrFromSlice(n.IP); ip.Unmap() == to {
			return n.State&valid != 0, nil
		}
	}

	return false, nil
}
