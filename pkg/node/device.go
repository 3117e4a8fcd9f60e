package node

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LinkLayer is the kind of header that packets of a device begin with.
type LinkLayer uint8

// The link layers.
const (
	LinkOther    LinkLayer = iota // a header that the programs cannot parse: InfiniBand, CAN
	LinkEthernet                  // an Ethernet header
	LinkIP                        // the IP header
)

// Device is one network device of this node.
type Device struct {
	Index int
	Name  string
	// Kind is the kernel's name of the kind of device: "veth", "bridge", "vxlan". It
	// is empty for hardware.
	Kind       string
	LinkLayer  LinkLayer
	IsUp       bool
	IsLoopback bool
	// Master is the bridge, bond or VRF that this device belongs to, or 0.
	Master int
	// Peer is the other end of a pair if that is in this network namespace, or 0.
	Peer int
	// Lower is the device of which this one is a VLAN, or above which it is a macvlan or an ipvlan, if that is in this
	// network namespace, or 0.
	Lower int
	// PeerNetns is 1 + the number by which the kernel knows the namespace of the other end in this one,
	// or 0 if there is none.
	PeerNetns uint32

	// TakesFrames is true if an Ethernet header is all that packets need to leave by
	// the device.
	TakesFrames bool

	// Bypassed names what of another owner runs at the device's ingress after the program of Sluice, and so
	// misses packets that this does not pass on. It is empty if there is nothing.
	Bypassed string

	// Network is the first address of global scope with a prefix shorter than the
	// address, as 192.168.50.1/24: other hosts can be reached there. It is invalid if
	// there is none.
	Network netip.Prefix
	// Gateway is the gateway of a route of the main table by the device, or invalid.
	Gateway netip.Addr

	// SourceV4 and SourceV6 are the addresses that this node sends from by the device,
	// if the route does not name another. They are invalid if the node has none.
	SourceV4 netip.Addr
	SourceV6 netip.Addr
}

// linkLayers maps package netlink's names of the ARPHRD_* constants to link layers.
// Two constants have no name.
var linkLayers = map[string]LinkLayer{
	"ether":   LinkEthernet,
	"none":    LinkIP, // wireguard, tun, xfrm
	"ipip":    LinkIP,
	"tunnel6": LinkIP,
	"sit":     LinkIP,
	"gre":     LinkIP,
	"ppp":     LinkIP,

	"unknown519": LinkIP, // ARPHRD_RAWIP: modems
	"unknown823": LinkIP, // ARPHRD_IP6GRE
}

// deviceOf returns the Device of a link, without the fields that depend on addresses
// and routes.
func deviceOf(link netlink.Link) Device {
	attrs := link.Attrs()
	device := Device{
		Index:      attrs.Index,
		Name:       attrs.Name,
		Kind:       link.Type(),
		LinkLayer:  linkLayers[attrs.EncapType],
		IsUp:       attrs.RawFlags&unix.IFF_UP != 0,
		IsLoopback: attrs.RawFlags&unix.IFF_LOOPBACK != 0,
		Master:     attrs.MasterIndex,
	}
	switch device.Kind { // package netlink's names
	case "device":
		device.Kind = ""
	case "tuntap":
		device.Kind = "tun"
	}
	device.TakesFrames = takesFrames(device, link)
	if slices.Contains([]string{"vlan", "macvlan", "ipvlan"}, device.Kind) && attrs.NetNsID < 0 {
		device.Lower = attrs.ParentIndex
	}
	// A peer in another namespace comes with the number of that namespace.
	if device.isPair() && attrs.NetNsID < 0 {
		device.Peer = attrs.ParentIndex
	} else if device.isPair() {
		device.PeerNetns = uint32(attrs.NetNsID) + 1
	}

	return device
}

// takesFrames reports [Device.TakesFrames], for the kinds of devices that it knows. A flow-based tunnel needs
// metadata with each packet. Packets to a member of a VRF or a bridge leave by the latter.
func takesFrames(d Device, link netlink.Link) bool {
	if d.LinkLayer != LinkEthernet || d.Master != 0 {
		return false
	}
	switch d.Kind {
	case "", "veth", "vlan", "bond", "team", "bridge", "macvlan":
		return true
	case "vxlan":
		vxlan, ok := link.(*netlink.Vxlan)

		return ok && !vxlan.FlowBased
	default:
		return false
	}
}

// isPair reports whether the device is one end of a pair.
func (d Device) isPair() bool { return d.Kind == "veth" || d.Kind == "netkit" }

// devicesOf returns the Devices of links, with their addresses and routes.
func devicesOf(links []netlink.Link, addrs []netlink.Addr, routes []netlink.Route) []Device {
	devices := make([]Device, 0, len(links))
	at := make(map[int]int, len(links)) // by index
	for _, link := range links {
		at[link.Attrs().Index] = len(devices)
		devices = append(devices, deviceOf(link))
	}
	own := make(map[netip.Addr]bool, len(addrs))
	for _, addr := range addrs {
		ip, ok := addressOf(addr)
		if !ok {
			continue
		}
		own[ip] = true
		if i, ok := at[addr.LinkIndex]; ok {
			devices[i].addAddress(ip, addr)
		}
	}
	for _, hop := range hopsOf(routes) {
		// Cilium has routes whose gateway is the node itself: no other host is there.
		if i, ok := at[hop.index]; ok && hop.gateway.IsValid() && !own[hop.gateway] && !devices[i].Gateway.IsValid() {
			devices[i].Gateway = hop.gateway
		}
	}
	fillSources(devices, at, routes)

	return devices
}

// addAddress sets the fields of the device that follow from one of its addresses.
func (d *Device) addAddress(ip netip.Addr, addr netlink.Addr) {
	switch {
	case !isSource(ip, addr):
	case ip.Is4():
		d.SourceV4 = cmp.Or(d.SourceV4, ip)
	default:
		d.SourceV6 = cmp.Or(d.SourceV6, ip)
	}
	network := addr.IPNet
	if addr.Peer != nil {
		network = addr.Peer // the prefix belongs to the peer's address
	}
	bits, size := network.Mask.Size()
	isNetwork := addr.Scope == unix.RT_SCOPE_UNIVERSE && !ip.IsLinkLocalUnicast() && bits < size
	if isNetwork && !d.Network.IsValid() {
		d.Network = netip.PrefixFrom(ip, bits)
	}
}

// hop is a next hop of a route.
type hop struct {
	index   int
	gateway netip.Addr // invalid if destinations are on the link
}

// hopsOf returns the next hops of all unicast routes.
func hopsOf(routes []netlink.Route) []hop {
	var hops []hop
	for _, route := range routes {
		if route.Type != unix.RTN_UNICAST {
			continue
		}
		if len(route.MultiPath) == 0 {
			hops = append(hops, hop{route.LinkIndex, gatewayOf(route.Gw, route.Via)})
		}
		for _, path := range route.MultiPath {
			hops = append(hops, hop{path.LinkIndex, gatewayOf(path.Gw, path.Via)})
		}
	}

	return hops
}

// gatewayOf returns a route's gateway, which may be of the other family.
func gatewayOf(gw []byte, via netlink.Destination) netip.Addr {
	if other, ok := via.(*netlink.Via); ok && other != nil {
		gw = other.Addr
	}
	addr, _ := netip.AddrFromSlice(gw)

	return addr.Unmap()
}

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
		v4, v6 = cmp.Or(v4, d.SourceV4), cmp.Or(v6, d.SourceV6)
	}
	for i := range devices {
		d := &devices[i]
		d.SourceV4, d.SourceV6 = cmp.Or(d.SourceV4, v4), cmp.Or(d.SourceV6, v6)
	}
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
