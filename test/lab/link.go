package lab

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// End is one end of a veth pair.
type End struct {
	Namespace *Namespace
	Device    string         // its name
	Addresses []netip.Prefix // that it gets
	Bridge    string         // the bridge it becomes a port of, "" for none
	MTU       int            // 0: 1500
}

// Veth joins two namespaces by a pair of devices, both up: they send and receive at
// once. The pair goes with either namespace.
func Veth(a, b End) error {
	pair := &netlink.Veth{
		LinkAttrs:     netlink.NewLinkAttrs(),
		PeerName:      b.Device,
		PeerNamespace: netlink.NsFd(b.Namespace.Handle()),
	}
	pair.Name = a.Device
	if err := a.Namespace.handle.LinkAdd(pair); err != nil {
		return fmt.Errorf("veth %s to %s: %w", a.Device, b.Device, err)
	}

	if err := errors.Join(a.setUp(), b.setUp()); err != nil {
		return err
	}

	return errors.Join(a.waitUp(), b.waitUp())
}

// waitUp waits until the kernel has seen that the device has its peer. As a rule that is
// at once, but if both have the same number, each in its own namespace, it is in the kernel's
// next round, of which there is one a second. Until then a bridge forwards nothing
// to its port, and the device has no link-local address from which to ask for neighbours.
func (e End) waitUp() error {
	return waitUntil(func() (bool, error) {
		link, err := e.Namespace.handle.LinkByName(e.Device)
		if err != nil {
			return false, fmt.Errorf("device %s in %s: %w", e.Device, e.Namespace.name, err)
		}

		return link.Attrs().OperState == netlink.OperUp, nil
	}, "device %s in %s is up", e.Device, e.Namespace.name)
}

// waitUntil waits for what the kernel does soon, on a busy machine later.
func waitUntil(done func() (bool, error), format string, args ...any) error {
	const timeout = 30 * time.Second
	for deadline := time.Now().Add(timeout); ; time.Sleep(time.Millisecond) {
		if is, err := done(); is || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s: "+format, append([]any{timeout}, args...)...)
		}
	}
}

func (e End) setUp() error {
	if e.MTU != 0 {
		if err := e.Namespace.SetMTU(e.Device, e.MTU); err != nil {
			return err
		}
	}
	if e.Bridge != "" {
		if err := e.Namespace.addPort(e.Bridge, e.Device); err != nil {
			return err
		}
	}
	if err := e.Namespace.SetUp(e.Device); err != nil {
		return err
	}
	for _, address := range e.Addresses {
		if err := e.Namespace.AddAddress(e.Device, address); err != nil {
			return err
		}
	}

	return nil
}

// AddBridge makes a bridge that forwards at once and to all, and gives it
// addresses.
func (ns *Namespace) AddBridge(device string, addresses ...netip.Prefix) error {
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs(), MulticastSnooping: &snooping}
	bridge.Name = device
	// One that is given stays. Otherwise a bridge takes the lowest of its ports',
	// and when a new port has a lower one, neighbours use the old one for a while.
	mac, err := randomMAC()
	if err != nil {
		return err
	}
	bridge.HardwareAddr = mac
	if err := ns.handle.LinkAdd(bridge); err != nil {
		return fmt.Errorf("bridge %s: %w", device, err)
	}

	return End{Namespace: ns, Device: device, Addresses: addresses}.setUp()
}

// AddVLAN makes a VLAN of a device, up, and gives it addresses.
func (ns *Namespace) AddVLAN(below, device string, id int, addresses ...netip.Prefix) error {
	err := ns.onLink(below, func(link netlink.Link) error {
		vlan := &netlink.Vlan{LinkAttrs: netlink.NewLinkAttrs(), VlanId: id, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}
		vlan.Name, vlan.ParentIndex = device, link.Attrs().Index

		return ns.handle.LinkAdd(vlan)
	})
	if err != nil {
		return fmt.Errorf("VLAN %s of %s: %w", device, below, err)
	}

	return End{Namespace: ns, Device: device, Addresses: addresses}.setUp()
}

func (ns *Namespace) addPort(bridge, device string) error {
	return ns.onLink(device, func(link netlink.Link) error {
		master, err := ns.handle.LinkByName(bridge)
		if err != nil {
			return err
		}
		return ns.handle.LinkSetMaster(link, master)
	})
}

// onLink does something with a device, found by its name.
func (ns *Namespace) onLink(device string, do func(netlink.Link) error) error {
	link, err := ns.handle.LinkByName(device)
	if err == nil {
		err = do(link)
	}
	if err != nil {
		return fmt.Errorf("device %s in %s: %w", device, ns.name, err)
	}

	return nil
}

// SetUp sets a device up.
func (ns *Namespace) SetUp(device string) error { return ns.onLink(device, ns.handle.LinkSetUp) }

// SetDown sets a device down. It loses its IPv6 addresses and all routes.
func (ns *Namespace) SetDown(device string) error { return ns.onLink(device, ns.handle.LinkSetDown) }

// SetMTU sets how large a packet a device sends.
func (ns *Namespace) SetMTU(device string, mtu int) error {
	return ns.onLink(device, func(link netlink.Link) error { return ns.handle.LinkSetMTU(link, mtu) })
}

// RemoveDevice removes a device, and its peer if it is one end of a pair.
func (ns *Namespace) RemoveDevice(device string) error {
	return ns.onLink(device, ns.handle.LinkDel)
}

// AddAddress gives a device an address, which is usable at once.
func (ns *Namespace) AddAddress(device string, address netip.Prefix) error {
	addr := netlinkAddr(address)
	if address.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	return ns.onLink(device, func(link netlink.Link) error {
		if err := ns.handle.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("add address %s: %w", address, err)
		}
		if address.Addr().Is4() || link.Attrs().RawFlags&(unix.IFF_LOOPBACK|unix.IFF_NOARP) != 0 {
			return nil
		}
		return waitUntil(func() (bool, error) { return ns.answersFor(link, address.Addr()) }, "neighbours get answers about %s", address)
	})
}

// answersFor reports whether a device has joined the group at which neighbours ask for an
// IPv6 address, its solicited-node address. The kernel joins it after it has added the address.
func (ns *Namespace) answersFor(link netlink.Link, ip netip.Addr) (is bool, err error) {
	group := netip.MustParseAddr("ff02::1:ff00:0").As16()
	address := ip.As16()
	copy(group[13:], address[13:])
	err = ns.Do(func() error {
		joined, err := os.ReadFile("/proc/thread-self/net/igmp6")
		is = slices.ContainsFunc(strings.Split(string(joined), "\n"), func(line string) bool {
			words := strings.Fields(line)
			return len(words) > 2 && words[1] == link.Attrs().Name && words[2] == hex.EncodeToString(group[:])
		})

		return err
	})

	return is, err
}

// RemoveAddress takes an address away.
func (ns *Namespace) RemoveAddress(device string, address netip.Prefix) error {
	return ns.onLink(device, func(link netlink.Link) error {
		if err := ns.handle.AddrDel(link, netlinkAddr(address)); err != nil {
			return fmt.Errorf("remove address %s: %w", address, err)
		}
		return nil
	})
}

// AddRoute leads a prefix to a gateway, or to several at equal costs. A route to the
// prefix that is there already is replaced.
func (ns *Namespace) AddRoute(to netip.Prefix, via ...netip.Addr) error {
	route := &netlink.Route{Dst: ipNet(to)}
	for _, gateway := range via {
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: gateway.AsSlice()})
	}
	if len(via) == 1 {
		route.Gw, route.MultiPath = via[0].AsSlice(), nil
	}
	if err := ns.handle.RouteReplace(route); err != nil {
		return fmt.Errorf("route to %s via %s in %s: %w", to, via, ns.name, err)
	}

	return nil
}

// AddDeviceRoute leads a prefix to a device, behind which it is. A route to the
// prefix that is there already is replaced.
func (ns *Namespace) AddDeviceRoute(to netip.Prefix, device string) error {
	return ns.onLink(device, func(link netlink.Link) error {
		route := &netlink.Route{Dst: ipNet(to), LinkIndex: link.Attrs().Index}
		if to.Addr().Is4() {
			route.Scope = netlink.SCOPE_LINK
		}
		if err := ns.handle.RouteReplace(route); err != nil {
			return fmt.Errorf("route to %s: %w", to, err)
		}
		return nil
	})
}

// SourceTo returns the source address that the kernel of the namespace chooses for
// packets to another.
func (ns *Namespace) SourceTo(to netip.Addr) (netip.Addr, error) {
	routes, err := ns.handle.RouteGet(to.AsSlice())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("route to %s in %s: %w", to, ns.name, err)
	}
	for _, route := range routes {
		if source, ok := netip.AddrFromSlice(route.Src); ok {
			return source.Unmap(), nil
		}
	}

	return netip.Addr{}, fmt.Errorf("route to %s in %s has no source", to, ns.name)
}

func netlinkAddr(address netip.Prefix) *netlink.Addr { return &netlink.Addr{IPNet: ipNet(address)} }

func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   prefix.Addr().AsSlice(),
		Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}
}

// randomMAC returns a locally administered unicast address.
func randomMAC() (net.HardwareAddr, error) {
	mac := make(net.HardwareAddr, 6)
	if _, err := rand.Read(mac); err != nil {
		return nil, fmt.Errorf("random MAC address: %w", err)
	}
	mac[0] = mac[0]&^1 | 2

	return mac, nil
}
