package lab

import (
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Attachment is how a pod hangs on its node: always by a veth pair, but what
// the node's end is differs from one CNI plugin to another.
type Attachment int

const (
	// Bridged makes it a port of br0, which has the pods' gateway address.
	Bridged Attachment = iota

	// Routed gives it no address at all, as Calico does: pods have addresses
	// without a neighbourhood, 10.244.n.x/32, and ask for a gateway 169.254.1.1,
	// for which the node answers by proxy ARP. In IPv6 the gateway is a link-local
	// address of the node.
	//
	//	pod-1-0: eth0 10.244.1.2/32 ┄┄ pod0 (proxy_arp, fe80::1) :node
	//	default via 169.254.1.1        10.244.1.2/32 dev pod0
	//
	Routed

	// PointToPoint gives each the gateway's address, 10.244.n.1/32, as the CNI
	// plugin ptp and kindnet do.
	//
	//	pod-1-0: eth0 10.244.1.2/32 ┄┄ pod0 10.244.1.1/32 :node
	//	default via 10.244.1.1         10.244.1.2/32 dev pod0
	//
	PointToPoint
)

// Where routed pods ask for their gateway.
var routedGateways = []netip.Addr{netip.MustParseAddr("169.254.1.1"), netip.MustParseAddr("fe80::1")}

// attach gives the pod its device and its default routes.
func (p *Pod) attach(addresses []netip.Prefix) error {
	mtu := p.Node.config.PodMTU
	if mtu == 0 {
		mtu = p.Node.config.OverlayMTU
	}
	pod := End{Namespace: p.Namespace, Device: "eth0", Addresses: addresses, MTU: mtu}
	node := End{Namespace: p.Node.Namespace, Device: p.Device, MTU: mtu}

	gateways := routedGateways
	if p.Node.config.Attachment != Routed {
		gateways = nil
		for _, prefix := range podPrefixes(p.Node.Number, 1) {
			gateways = append(gateways, prefix.Addr())
		}
	}
	if p.Node.config.Attachment != Bridged {
		pod.Addresses = singles(p.IPv4, p.IPv6)

		return p.attachRouted(pod, node, gateways)
	}
	node.Bridge = "br0"
	err := Veth(pod, node)
	for i := 0; i < len(gateways) && err == nil; i++ {
		err = p.AddRoute(defaultRoutes[i], gateways[i])
	}

	return err
}

// attachRouted joins a pod and its node by routes to single addresses.
func (p *Pod) attachRouted(pod, node End, gateways []netip.Addr) error {
	if p.Node.config.Attachment == PointToPoint {
		node.Addresses = singles(gateways...)
	}
	if err := Veth(pod, node); err != nil {
		return err
	}
	if p.Node.config.Attachment == Routed {
		err := errors.Join(
			p.Node.Sysctl("net/ipv4/conf/"+p.Device+"/proxy_arp", "1"),
			// Else the kernel waits for up to 0.8 s before it answers.
			p.Node.Sysctl("net/ipv4/neigh/"+p.Device+"/proxy_delay", "0"),
			p.Node.AddAddress(p.Device, netip.PrefixFrom(gateways[1], 64)),
		)
		if err != nil {
			return err
		}
	}
	for i, gateway := range gateways {
		err := errors.Join(
			p.Node.AddDeviceRoute(singles(p.IPv4, p.IPv6)[i], p.Device),
			p.AddDeviceRoute(singles(gateway)[0], "eth0"),
			p.onLink("eth0", func(link netlink.Link) error {
				return p.handle.RouteAdd(&netlink.Route{
					Dst:       ipNet(defaultRoutes[i]),
					Gw:        gateway.AsSlice(),
					LinkIndex: link.Attrs().Index,
				})
			}),
		)
		if err != nil {
			return err
		}
	}

	return nil
}

// singles makes each address a prefix of its own.
func singles(addresses ...netip.Addr) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, address := range addresses {
		prefixes = append(prefixes, netip.PrefixFrom(address, address.BitLen()))
	}

	return prefixes
}
