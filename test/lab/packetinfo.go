package lab

import (
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// PacketInfo reads from a datagram's control messages where it was sent to, and
// returns the control message that sends the answer from there. Both are zero if
// the messages do not have.
func PacketInfo(control []byte) (to netip.Addr, source []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, nil
	}
	for _, message := range messages {
		switch {
		case message.Header.Level == unix.IPPROTO_IP && message.Header.Type == unix.IP_PKTINFO &&
			len(message.Data) >= unix.SizeofInet4Pktinfo:
			info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&message.Data[0]))
			return netip.AddrFrom4(info.Addr), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: info.Addr})
		case message.Header.Level == unix.IPPROTO_IPV6 && message.Header.Type == unix.IPV6_PKTINFO &&
			len(message.Data) >= unix.SizeofInet6Pktinfo:
			info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&message.Data[0]))
			return netip.AddrFrom16(info.Addr), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: info.Addr})
		}
	}

	return netip.Addr{}, nil
}

// unmapped turns an address of package net into one of netip, without v4-mapped
// ones.
func unmapped(addr net.Addr) netip.AddrPort {
	var addrPort netip.AddrPort
	switch addr := addr.(type) {
	case *net.TCPAddr:
		addrPort = addr.AddrPort()
	case *net.UDPAddr:
		addrPort = addr.AddrPort()
	}

	return netip.AddrPortFrom(addrPort.Addr().Unmap(), addrPort.Port())
}
