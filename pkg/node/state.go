package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// State is this node as the kernel has it.
type State struct {
	// Addresses are all usable addresses, sorted by address and device.
	Addresses []Address
	// Devices are all devices, in the kernel's order.
	Devices []Device
	// Concern names something that the network stack does to forwarded packets beyond routing
	// them, such as filtering: then packets must not bypass it. It is empty if there is nothing.
	Concern string
}

func (s State) equal(o State) bool {
	return slices.Equal(s.Addresses, o.Addresses) && slices.Equal(s.Devices, o.Devices) && s.Concern == o.Concern
}

func (s State) clone() State {
	s.Addresses, s.Devices = slices.Clone(s.Addresses), slices.Clone(s.Devices)

	return s
}

// list reads the whole state from the kernel.
func list(handle *netlink.Handle, forwarding *forwarding) (State, error) {
	links, err := complete(handle.LinkList)
	if err != nil {
		return State{}, fmt.Errorf("list devices: %w", err)
	}
	addrs, err := complete(func() ([]netlink.Addr, error) { return handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return State{}, fmt.Errorf("list addresses: %w", err)
	}
	var routes []netlink.Route
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		more, err := complete(func() ([]netlink.Route, error) {
			return handle.RouteListFiltered(family, &netlink.Route{}, 0) // of the main table
		})
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) {
			return State{}, fmt.Errorf("list routes: %w", err)
		}
		routes = append(routes, more...)
	}

	return State{
		Addresses: addressesOf(withoutIPVS(addrs, links)), Devices: devicesOf(links, addrs, routes), Concern: forwarding.concern(),
	}, nil
}

// ipvsDevice has the addresses of Services when kube-proxy runs in IPVS mode, and
// still when it has ended. They are not addresses of the node.
const ipvsDevice = "kube-ipvs0"

func withoutIPVS(addrs []netlink.Addr, links []netlink.Link) []netlink.Addr {
	i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == ipvsDevice })
	if i < 0 {
		return addrs
	}
	index := links[i].Attrs().Index

	return slices.DeleteFunc(slices.Clone(addrs), func(a netlink.Addr) bool { return a.LinkIndex == index })
}

// complete repeats a dump that a change has interrupted: it may lack some entries.
func complete[T any](ask func() (T, error)) (T, error) {
	const tries = 10
	var listed T
	var err error = netlink.ErrDumpInterrupted
	for i := 0; i < tries && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		listed, err = ask()
	}

	return listed, err
}
