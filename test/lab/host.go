package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
)

// Host is a machine on the uplink segment, by its device eth0, and on the second
// one, by eth1.
type Host struct {
	*Namespace
	Name string // "node-1", "client"
	IPv4 netip.Addr
	IPv6 netip.Addr

	// SecondIPv4 and SecondIPv6 are those of eth1, zero without a second uplink.
	SecondIPv4 netip.Addr
	SecondIPv6 netip.Addr
}

const (
	firstSegment  = 50
	secondSegment = 51

	gatewayNumber = 254
	subflowNumber = 253
	clientNumber  = 100
)

var defaultRoutes = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// newSegment makes a switch whose address is a gateway.
func newSegment(name string, segment int) (*Namespace, error) {
	ns, err := NewNamespace(name)
	if err != nil {
		return nil, err
	}
	// A switch does not filter what it switches.
	for _, setting := range []string{"bridge-nf-call-iptables", "bridge-nf-call-ip6tables"} {
		if err := ns.Sysctl("net/bridge/"+setting, "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(err, ns.Close())
		}
	}
	if err := ns.AddBridge("br0", segmentPrefixes(segment, gatewayNumber)...); err != nil {
		return nil, errors.Join(err, ns.Close())
	}

	return ns, nil
}

// newHost makes a machine of a profile on the uplink segments. Devices begin with what
// the profile sets as their default.
func (c *Cluster) newHost(name string, number int, profile Profile) (*Host, error) {
	ns, err := NewNamespace(name)
	if err != nil {
		return nil, err
	}
	host := &Host{Namespace: ns, Name: name}
	err = profile.Apply(ns)
	if err == nil {
		err = host.attach(c, number)
	}
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}

	return host, nil
}

func (h *Host) attach(c *Cluster, number int) error {
	addresses := segmentPrefixes(firstSegment, number)
	h.IPv4, h.IPv6 = addresses[0].Addr(), addresses[1].Addr()
	err := h.join(c, c.Uplink, "eth0", firstSegment, addresses)
	gateways := segmentPrefixes(firstSegment, gatewayNumber)
	for i := 0; i < len(gateways) && err == nil; i++ {
		err = h.AddRoute(defaultRoutes[i], gateways[i].Addr())
	}
	if err != nil || c.Second == nil {
		return err
	}
	addresses = segmentPrefixes(secondSegment, number)
	h.SecondIPv4, h.SecondIPv6 = addresses[0].Addr(), addresses[1].Addr()

	return h.join(c, c.Second, "eth1", secondSegment, addresses)
}

// join gives the host a device on a segment, or a VLAN of the segment's number on a device there.
func (h *Host) join(c *Cluster, segment *Namespace, device string, vlan int, addresses []netip.Prefix) error {
	end := End{Namespace: h.Namespace, Device: device, Addresses: addresses}
	if c.config.VLANs {
		end = End{Namespace: h.Namespace, Device: TrunkOf(device)}
	}
	err := Veth(end, End{Namespace: segment, Device: h.Name, Bridge: "br0"})
	if err == nil && c.config.VLANs {
		err = h.AddVLAN(end.Device, device, vlan, addresses...)
	}

	return err
}

// TrunkOf is the name of the device of which an uplink is a VLAN: see [Config.VLANs].
func TrunkOf(uplink string) string { return "trunk" + strings.TrimPrefix(uplink, "eth") }

// addSubflows has Multipath TCP open a further subflow of each connection, from another
// address of the host.
func (h *Host) addSubflows() error {
	commands := []string{"ip mptcp limits set subflow 2"}
	for _, address := range segmentPrefixes(firstSegment, subflowNumber) {
		commands = append(commands,
			fmt.Sprintf("ip address add %s dev eth0 nodad preferred_lft 0", address), // for nothing else
			fmt.Sprintf("ip mptcp endpoint add %s dev eth0 subflow", address.Addr()))
	}
	for _, command := range commands {
		words := strings.Fields(command)
		if _, err := Output(h.Namespace, nil, words[0], words[1:]...); err != nil {
			return err
		}
	}

	return nil
}

// At is where a server of the host listens, for [Serve]: the port on both its
// addresses.
func (h *Host) At(port uint16) []string { return at(port, h.IPv4, h.IPv6) }

// segmentPrefixes is 192.168.s.n/24 and fd00:s::n/64, with s and n in decimal in
// both.
func segmentPrefixes(segment, number int) []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix(fmt.Sprintf("192.168.%d.%d/24", segment, number)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:%d::%d/64", segment, number)),
	}
}
