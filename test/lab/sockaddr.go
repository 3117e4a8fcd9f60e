package lab

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// sockaddrOf turns "10.0.0.1:80", "[fd00::1]:80", "[fe80::1%eth0]:80" or
// "[::ffff:10.0.0.1]:80" into what the kernel takes. The family is that of the
// text: a v4-mapped address stays an IPv6 one.
func sockaddrOf(address string) (unix.Sockaddr, error) {
	addr, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}, nil
	}
	sa := &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
	if zone := addr.Addr().Zone(); zone != "" {
		link, err := net.InterfaceByName(zone)
		if err != nil {
			return nil, err
		}
		sa.ZoneId = uint32(link.Index)
	}

	return sa, nil
}

// addrPortOf is the way back. It is zero for no address. A zone is a number: the
// device's index.
func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		addr := netip.AddrFrom16(sa.Addr)
		if sa.ZoneId != 0 {
			addr = addr.WithZone(strconv.Itoa(int(sa.ZoneId)))
		}
		return netip.AddrPortFrom(addr, uint16(sa.Port))
	default:
		return netip.AddrPort{}
	}
}

// socketKind reads a network as package net names it: tcp4, tcp6, udp4, udp6.
// Plain tcp and udp mean the family of the address.
func socketKind(network, address string) (domain, kind int, err error) {
	switch network {
	case "tcp", "udp":
		addr, err := netip.ParseAddrPort(address)
		if err != nil {
			return 0, 0, fmt.Errorf("network %s: family: %w", network, err)
		}
		if addr.Addr().Is4() {
			return socketKind(network+"4", address)
		}
		return socketKind(network+"6", address)
	case "tcp4":
		return unix.AF_INET, unix.SOCK_STREAM, nil
	case "tcp6":
		return unix.AF_INET6, unix.SOCK_STREAM, nil
	case "udp4":
		return unix.AF_INET, unix.SOCK_DGRAM, nil
	case "udp6":
		return unix.AF_INET6, unix.SOCK_DGRAM, nil
	default:
		return 0, 0, fmt.Errorf("unknown network %q", network)
	}
}
