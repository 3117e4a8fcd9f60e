package node

import (
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LinkLayer is what packets of a device begin with.
type LinkLayer uint8

// The link layers.
const (
	LinkOther    LinkLayer = iota // something that we cannot read: InfiniBand, CAN
	LinkEthernet                  // an Ethernet header
	LinkIP                        // the IP header
)

// Device is one network device of this node.
type Device struct {
	Index int
	Name  string
	// Kind is what the kernel calls it: "veth", "bridge", "vxlan". It is empty
	// for a device that is none of the virtual kinds, as hardware is.
	Kind       string
	LinkLayer  LinkLayer
	IsUp       bool
	IsLoopback bool
	// Master is the device that this one belongs to: a bridge, a bond, a VRF. It
	// is 0 for one that stands alone.
	Master int
	// Peer is the other end of a pair, if that is on this node too. Otherwise it
	// is 0.
	Peer int

	// TakesFrames: whatever leaves by the device needs nothing but an Ethernet header.
	TakesFrames bool

	// Network is the first address of global scope with a network around it,
	// as 192.168.50.1/24: others can be reached there. A /32 is none.
	Network netip.Prefix
	// Gateway is one that a route of the main table reaches by the device.
	Gateway netip.Addr

	// SourceV4 and SourceV6 are what this node sends from by the device, if no
	// route says otherwise. They are invalid if the node has no such address.
	SourceV4 netip.Addr
	SourceV6 netip.Addr
}

// linkLayers has the kinds of link layers by netlink's names for the ARPHRD_*
// constants; two have none.
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

// deviceOf turns a link into a Device, but for what its addresses and routes say.
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
	switch device.Kind { // as package netlink calls them
	case "device":
		device.Kind = ""
	case "tuntap":
		device.Kind = "tun"
	}
	device.TakesFrames = takesFrames(device, link)
	// Without the number of another namespace, the link's index is of this one.
	if device.isPair() && attrs.NetNsID < 0 {
		device.Peer = attrs.ParentIndex
	}

	return device
}

// takesFrames does not know every kind of device for which it is true. A tunnel may be told with each packet
// where it goes; what belongs to a VRF or a bridge is not where routes lead.
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

// isPair says that the device is one end of two.
func (d Device) isPair() bool { return d.Kind == "veth" || d.Kind == "netkit" }

// devicesOf puts together what the kernel lists, by index.
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
		// A gateway that is the node itself leads nowhere: Cilium has such routes.
		if i, ok := at[hop.index]; ok && hop.gateway.IsValid() && !own[hop.gateway] && !devices[i].Gateway.IsValid() {
			devices[i].Gateway = hop.gateway
		}
	}
	fillSources(devices, at, routes)

	return devices
}

// addAddress takes in what one address says of the device.
func (d *Device) addAddress(ip netip.Addr, addr netlink.Addr) {
	if isSource(ip, addr) {
		if ip.Is4() && !d.SourceV4.IsValid() {
			d.SourceV4 = ip
		}
		if ip.Is6() && !d.SourceV6.IsValid() {
			d.SourceV6 = ip
		}
	}
	network := addr.IPNet
	if addr.Peer != nil {
		network = addr.Peer // the prefix is that of the other side
	}
	bits, size := network.Mask.Size()
	isNetwork := addr.Scope == unix.RT_SCOPE_UNIVERSE && !ip.IsLinkLocalUnicast() && bits < size
	if isNetwork && !d.Network.IsValid() {
		d.Network = netip.PrefixFrom(ip, bits)
	}
}

// hop is where a route leads.
type hop struct {
	index   int
	gateway netip.Addr // invalid: none, what is there is reached directly
}

// hopsOf returns all places that unicast routes lead to.
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
