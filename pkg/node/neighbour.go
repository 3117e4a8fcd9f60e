package node

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// ConfirmNeighbours makes the kernel ask those neighbours on devices of the calling thread's network namespace for
// their Ethernet address that it has not heard of for a while. A program that addresses frames to a neighbour by itself
// does not do that: without it, it would go on with the address of a pod that has gone when another one has its IP
// address. Neighbours that do not answer lose theirs after some seconds.
func ConfirmNeighbours(devices []int) error {
	var errs []error
	for _, index := range devices {
		known, err := Complete(func() ([]netlink.Neigh, error) { return netlink.NeighList(index, netlink.FAMILY_ALL) })
		if err != nil {
			errs = append(errs, fmt.Errorf("list neighbours of device %d: %w", index, err))
		}
		for _, neighbour := range known {
			if neighbour.State != netlink.NUD_STALE {
				continue
			}
			neighbour.Flags = netlink.NTF_USE
			if err := netlink.NeighSet(&neighbour); err != nil {
				errs = append(errs, fmt.Errorf("neighbour %s: %w", neighbour.IP, err))
			}
		}
	}

	return errors.Join(errs...)
}
