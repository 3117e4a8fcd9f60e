package lab

import (
	"errors"
	"fmt"
	"net/netip"
)

// Where a host behind a pod asks for its gateway, which is the pod.
var behindGateways = []netip.Addr{netip.MustParseAddr("172.30.255.1"), netip.MustParseAddr("fd00:172:30:255::1")}

// addBehind makes the pod the gateway of a host, for which it forwards:
//
//	pod-1-0: eth0 ┄ behind 172.30.255.1 ┄┄ eth0 172.30.1.2 :host
//	                fd00:172:30:255::1          fd00:172:30:1::2
func (p *Pod) addBehind() error {
	name := "behind-" + p.Name
	ns, err := NewNamespace(name)
	if err != nil {
		return err
	}
	p.Behind = &Host{
		Namespace: ns,
		Name:      name,
		IPv4:      netip.MustParseAddr(fmt.Sprintf("172.30.%d.%d", p.Node.Number, p.number+2)),
		IPv6:      netip.MustParseAddr(fmt.Sprintf("fd00:172:30:%d::%d", p.Node.Number, p.number+2)),
	}
	addresses := singles(p.Behind.IPv4, p.Behind.IPv6)
	err = errors.Join(
		p.Sysctl("net/ipv4/ip_forward", "1"),
		p.Sysctl("net/ipv6/conf/all/forwarding", "1"),
		Veth(
			End{Namespace: p.Namespace, Device: "behind", Addresses: singles(behindGateways...)},
			End{Namespace: ns, Device: "eth0", Addresses: addresses},
		),
	)
	for i, gateway := range behindGateways {
		if err == nil {
			err = errors.Join(
				p.AddDeviceRoute(addresses[i], "behind"),
				ns.AddDeviceRoute(singles(gateway)[0], "eth0"),
				ns.AddRoute(defaultRoutes[i], gateway),
			)
		}
	}

	return err
}

// leadBehind gives the pod's node routes to the host behind the pod.
func (p *Pod) leadBehind() error {
	return errors.Join(
		p.Node.AddRoute(singles(p.Behind.IPv4)[0], p.IPv4),
		p.Node.AddRoute(singles(p.Behind.IPv6)[0], p.IPv6),
	)
}

// addSecondInterface gives the pod a device net1 on the second segment, in a network
// that no node has an address of.
func (p *Pod) addSecondInterface() error {
	return Veth(
		End{Namespace: p.Namespace, Device: "net1", Addresses: []netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("172.20.%d.%d/16", p.Node.Number, p.number+2)),
			netip.MustParsePrefix(fmt.Sprintf("fd00:172:20::%d:%d/64", p.Node.Number, p.number+2)),
		}},
		End{Namespace: p.Node.second, Device: p.Name, Bridge: "br0"},
	)
}
