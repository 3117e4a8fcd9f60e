// Package node watches the addresses of this node, on which node ports answer, and
// its devices, and decides to which devices programs are attached. It reads the
// kernel's state by netlink, not the Kubernetes Node object.
package node

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// loopbackIndex is the index of the loopback device in every network namespace.
const loopbackIndex = 1

// Address is one address of this node.
type Address struct {
	// Addr is never v4-mapped and has no zone: IfIndex is the zone of a link-local
	// address.
	Addr netip.Addr
	// IfIndex is the device that has the address.
	IfIndex int
	// IsLoopback is true if the device is lo. Its addresses need not be loopback
	// addresses, see Addr.IsLoopback: virtual addresses are often added to lo.
	IsLoopback bool
}

func (a Address) compare(b Address) int {
	return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.IfIndex, b.IfIndex))
}

// addressesOf returns the usable addresses among those that the kernel lists, as a
// sorted set.
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

	// A device may have an address twice, with different prefixes.
	return slices.Compact(addresses)
}

// addressOf returns the IP address, and false if it is neither IPv4 nor IPv6.
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
