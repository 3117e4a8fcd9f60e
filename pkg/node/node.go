// Package node watches the addresses of this node, on which node ports answer, and
// its devices, and decides to which devices programs are attached. It reads the
// kernel's state by netlink, and does not read the Kubernetes Node object.
//
// [Watch] reports the [State] (watch.go); [Decide] classifies its devices (decide.go); [Model]
// has what follows for the maps from the state and the Node object together (model.go).
package node

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// State is this node as the kernel has it. It is read only.
type State struct {
	// Addresses are all usable addresses, sorted by address and device: those of devices, and
	// single ones that are local by a route.
	Addresses []Address
	// Devices are all devices, in the kernel's order.
	Devices []Device
	// Concern names something that the network stack does to forwarded packets beyond routing
	// them, such as filtering: then packets must not bypass it. It is empty if there is nothing.
	Concern string
	// Encrypts is true if there are policies of IPsec, which the stack applies to what it routes.
	Encrypts bool
}

// loopbackIndex is the index of the loopback device in every network namespace.
const loopbackIndex = 1

// Address is one address of this node.
type Address struct {
	// Addr is never v4-mapped and has no zone: IfIndex is the zone of a link-local
	// address.
	Addr netip.Addr
	// IfIndex is the device that has the address, or to which its local route leads.
	IfIndex int
	// IsLoopback is true if the device is lo. Its addresses need not be loopback
	// addresses, see Addr.IsLoopback: virtual addresses are often added to lo.
	IsLoopback bool
}

func (s State) equal(o State) bool {
	return slices.Equal(s.Addresses, o.Addresses) && slices.Equal(s.Devices, o.Devices) &&
		s.Concern == o.Concern && s.Encrypts == o.Encrypts
}

// Read returns the state of the calling thread's network namespace.
func Read() (State, error) {
	ns, err := netns.Get()
	if err != nil {
		return State{}, fmt.Errorf("network namespace of this thread: %w", err)
	}
	defer ns.Close()
	r, err := newReader(ns)
	if err != nil {
		return State{}, err
	}
	defer r.close()

	state, err := r.read()
	state.add(r.concern())

	return state, err
}

// add adds a concern, which precedes what the state has.
func (s *State) add(c concern) {
	s.Concern, s.Encrypts = cmp.Or(c.text, s.Concern), c.encrypts
}

// reader reads the state of a network namespace from the kernel, by sockets that stay open.
type reader struct {
	ns     netns.NsHandle
	routes *netlink.Handle
	xfrm   *netlink.Handle // nil if the kernel has no IPsec
	tables nftables

	bypassed func(devices []int) (map[int]string, error) // see Config; it may be nil
	devices  Rules                                       // of devices, see Config
}

// newReader returns a reader of the namespace ns. The caller closes it.
func newReader(ns netns.NsHandle) (*reader, error) {
	r := &reader{ns: ns}
	var err error
	if r.routes, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	if r.xfrm, err = netlink.NewHandleAt(ns, unix.NETLINK_XFRM); err != nil && !isUnknown(err) {
		r.close()

		return nil, fmt.Errorf("netlink socket of IPsec: %w", err)
	}
	if r.tables, err = openNFTables(ns); err != nil {
		r.close()

		return nil, err
	}

	return r, nil
}

func (r *reader) close() {
	r.routes.Close()
	if r.xfrm != nil {
		r.xfrm.Close()
	}
	r.tables.close()
}

// read reads the state. Of concerns it has only that about programs of others: the others may take long, see [reader.concern].
func (r *reader) read() (State, error) {
	links, err := Complete(r.routes.LinkList)
	if err != nil {
		return State{}, fmt.Errorf("list devices: %w", err)
	}
	addrs, err := Complete(func() ([]netlink.Addr, error) { return r.routes.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return State{}, fmt.Errorf("list addresses: %w", err)
	}
	var routes []netlink.Route
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		more, err := Complete(func() ([]netlink.Route, error) {
			return r.routes.RouteListFiltered(family, &netlink.Route{}, 0) // of the main table
		})
		if err != nil && !isUnknown(err) {
			return State{}, fmt.Errorf("list routes: %w", err)
		}
		routes = append(routes, more...)
	}

	local, err := r.localRoutes()
	if err != nil {
		return State{}, err
	}

	state := State{Devices: devicesOf(links, addrs, routes)}
	state.Concern = r.fillBypassed(state.Devices)
	if i := slices.IndexFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == ipvsDevice }); i >= 0 {
		index := links[i].Attrs().Index
		addrs = slices.DeleteFunc(addrs, func(a netlink.Addr) bool { return a.LinkIndex == index })
	}
	state.Addresses = addressesOf(addrs, local)

	return state, nil
}

// localRoutes returns the routes by which single addresses are this node's own though no device
// has them, as Google's cloud adds those of its load balancers.
func (r *reader) localRoutes() ([]netlink.Route, error) {
	filter := netlink.Route{Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL}
	var single []netlink.Route
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := Complete(func() ([]netlink.Route, error) {
			return r.routes.RouteListFiltered(family, &filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		})
		if err != nil && !isUnknown(err) {
			return nil, fmt.Errorf("list local routes: %w", err)
		}
		for _, route := range routes {
			// The kernel adds one for each address that a device has.
			if route.Protocol == unix.RTPROT_KERNEL || route.Dst == nil {
				continue
			}
			if ones, bits := route.Dst.Mask.Size(); ones == bits {
				single = append(single, route)
			}
		}
	}

	return single, nil
}

// ipvsDevice has the addresses of Services when kube-proxy runs in IPVS mode, and
// still when it has ended. They are not addresses of the node.
const ipvsDevice = "kube-ipvs0"

// addressesOf returns the usable addresses among those that the kernel lists, and
// those of local routes, as a sorted set.
func addressesOf(listed []netlink.Addr, local []netlink.Route) []Address {
	addresses := make([]Address, 0, len(listed)+len(local))
	add := func(ip netip.Addr, device int) {
		addresses = append(addresses, Address{Addr: ip, IfIndex: device, IsLoopback: device == loopbackIndex})
	}
	for _, addr := range listed {
		ip, ok := addressOf(addr)
		if !ok || !isUsable(addr.Flags) {
			continue
		}
		add(ip, addr.LinkIndex)
	}
	for _, route := range local {
		if ip, ok := netip.AddrFromSlice(route.Dst.IP); ok {
			add(ip.Unmap(), route.LinkIndex)
		}
	}
	slices.SortFunc(addresses, func(a, b Address) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.IfIndex, b.IfIndex))
	})

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

// Families returns the address families that the kernel supports in the calling
// thread's network namespace. IPv6 may be missing or switched off.
func Families() []lb.Family {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err != nil {
		return []lb.Family{lb.IPv4}
	}
	disabled, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	if err == nil && strings.TrimSpace(string(disabled)) == "1" {
		return []lb.Family{lb.IPv4}
	}

	return []lb.Family{lb.IPv4, lb.IPv6}
}
