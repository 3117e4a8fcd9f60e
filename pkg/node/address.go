// Package node watches the addresses of this node, which are where NodePorts
// answer, and its devices, and decides which of those are to be attached to. It
// is not a view of the Kubernetes Node object: it asks the kernel, by netlink.
package node

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The loopback device has this index in every network namespace.
const loopbackIndex = 1

// Address is one address of this node.
type Address struct {
	// Addr is never v4-mapped and has no zone: of a link-local address, IfIndex
	// is the zone.
	Addr netip.Addr
	// IfIndex is the device that has the address.
	IfIndex int
	// IsLoopback says that the device is lo. Its addresses need not be loopback
	// addresses, which Addr.IsLoopback knows: a virtual address is often put there.
	IsLoopback bool
}

func (a Address) compare(b Address) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.IfIndex, b.IfIndex))
}

// addressesOf turns what the kernel lists into a sorted set.
func addressesOf(listed []netlink.Addr) []Address {
	addresses := make([]Address, 0, len(listed))
	for _, addr := range listed {
		ip, ok := addressOf(addr)
		if !ok || !isUsable(addr.Flags) {
			continue
		}
		addresses = append(addresses, Address{
			Addr:       ip,
			IfIndex:    addr.LinkIndex,
			IsLoopback: addr.LinkIndex == loopbackIndex,
		})
	}
	slices.SortFunc(addresses, Address.compare)

	// One address on one device twice, with different prefixes, is one to us.
	return slices.Compact(addresses)
}

// addressOf returns the address itself. It is false for one that is neither IPv4
// nor IPv6.
func addressOf(addr netlink.Addr) (netip.Addr, bool) {
	if addr.IPNet == nil {
		return netip.Addr{}, false
	}
	ip, ok := netip.AddrFromSlice(addr.IP)

	return ip.Unmap(), ok
}

// isUsable reports whether the kernel accepts packets to an address with these
// flags: an IPv6 address must not be waiting for the end of duplicate address
// detection, unless it is optimistic, nor have failed it.
func isUsable(flags int) bool {
	tentative := flags&unix.IFA_F_TENTATIVE != 0 && flags&unix.IFA_F_OPTIMISTIC == 0

	return !tentative && flags&unix.IFA_F_DADFAILED == 0
}
