package bpf

import (
	"fmt"
	"net/netip"
)

// The addresses of the packet tables. Tables contain IPv4 addresses; the same row runs with IPv6, where
// 8.0.n.m is 2001:db8:86dd:n::m.
//
// Every IPv4 address begins with 8.0, and every IPv6 address has 86dd in the
// third place, because a test run reads bytes 12 and 13 of its input as the EtherType. On a device without
// Ethernet they are in the middle of the source address, which therefore contains 0x0800 or 0x86dd.
const (
	client   = "8.0.100.1:40000" // beyond the uplink
	stranger = "8.0.100.2:40000"
	router   = "8.0.100.9:0" // on the way to the client

	clusterIP = "8.0.96.1:80"
	balancer  = "8.0.30.1:80" // a load balancer's address
	nodePort  = "0.0.0.0:30080"

	node        = "8.0.50.1:0" // eth0, the way to clients and to the pods of node 2
	nodeOther   = "8.0.51.1:0" // eth1
	nodePrefers = "8.0.51.77:0"
	bridge      = "8.0.1.1:0"

	defaultRouter = "8.0.50.254:0" // by eth0
	farRouter     = "8.0.50.2:0"   // node 2, by the same
	nodeThree     = "8.0.51.3:0"   // by eth1

	portPod    = "8.0.1.2:8080" // behind the bridge
	portPodToo = "8.0.1.3:8080"
	tapPod     = "8.0.4.2:8080"
	remotePod  = "8.0.2.7:8080"   // of node 2
	farPod     = "8.0.3.7:8080"   // by eth1, whose route prefers another source
	lonelyPod  = "8.0.5.7:8080"   // by a device with none but a link-local address
	nowhere    = "8.0.200.7:8080" // no route leads there
	hostPod    = "8.0.50.1:8080"  // in the network namespace of this node

	otherServer = "8.0.77.1:80"
)

// at reads an address with its port.
func at(text string) netip.AddrPort { return netip.MustParseAddrPort(text) }

// six returns the IPv6 address for an address of the plan.
func six(a netip.Addr) netip.Addr {
	b := a.As4()
	switch {
	case a == netip.IPv4Unspecified():
		return netip.IPv6Unspecified()
	case a.IsLoopback():
		return netip.IPv6Loopback()
	case a.IsMulticast():
		return netip.MustParseAddr("ff02::1")
	case a.IsLinkLocalUnicast():
		return netip.MustParseAddr(fmt.Sprintf("fe80::%d:%d", b[2], b[3]))
	}

	return netip.MustParseAddr(fmt.Sprintf("2001:db8:86dd:%d::%d", b[2], b[3]))
}

// family is the IP family in which a row runs.
type family int

const (
	ipv4 = family(4)
	ipv6 = family(6)
)

var families = []family{ipv4, ipv6}

func (f family) String() string { return fmt.Sprintf("IPv%d", int(f)) }

// addr is an address of the plan in this family.
func (f family) addr(a netip.Addr) netip.Addr {
	if f == ipv6 && a.Is4() {
		return six(a)
	}

	return a
}

func (f family) addrPort(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(f.addr(a.Addr()), a.Port())
}

// prefix is a range of the plan: 8.0.n.0/24 is 2001:db8:86dd:n::/64.
func (f family) prefix(text string) netip.Prefix {
	p := netip.MustParsePrefix(text)
	if f == ipv4 {
		return p
	}
	bits := map[int]int{0: 0, 8: 8, 16: 48, 24: 64, 32: 128}[p.Bits()]

	return netip.PrefixFrom(six(p.Addr()), bits)
}
