package node

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// State is what the kernel says of this node.
type State struct {
	// Addresses are all usable ones, sorted by address and device.
	Addresses []Address
	// Devices are all there are, in the kernel's order.
	Devices []Device
	// Concern is why packets must not be led past the node's network stack: what it would do to those
	// that it forwards, beyond routing them. It is empty if there is nothing.
	Concern string
}

func (s State) equal(o State) bool {
	return slices.Equal(s.Addresses, o.Addresses) && slices.Equal(s.Devices, o.Devices) && s.Concern == o.Concern
}

func (s State) clone() State {
	s.Addresses, s.Devices = slices.Clone(s.Addresses), slices.Clone(s.Devices)

	return s
}

// list asks the kernel for everything.
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
			return handle.RouteListFiltered(family, &netlink.Route{}, 0) // those of the main table
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

// ipvsDevice is where kube-proxy in IPVS mode puts the addresses of Services, and
// leaves them when it ends. They are none of the node's own.
const ipvsDevice = "kube-ipvs0"

func withoutIPVS(addrs []netlink.Addr, links []netlink.Link) []netlink.Addr {
	i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == ipvsDevice })
	if i < 0 {
		return addrs
	}
	index := links[i].Attrs().Index

	return slices.DeleteFunc(slices.Clone(addrs), func(a netlink.Addr) bool { return a.LinkIndex == index })
}

// complete asks for a list again if something changed meanwhile: some of it may
// be missing then.
func complete[T any](ask func() (T, error)) (T, error) {
	const tries = 10
	var listed T
	var err error = netlink.ErrDumpInterrupted
	for i := 0; i < tries && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		listed, err = ask()
	}

	return listed, err
}
