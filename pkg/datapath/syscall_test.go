package datapath

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sockaddr returns the kernel's form of an address in text.
func sockaddr(text string) unix.Sockaddr {
	a := netip.MustParseAddrPort(text)
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}

	return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}

	return netip.AddrPort{}
}

// family is the address family of an address in text.
func family(text string) int {
	if netip.MustParseAddrPort(text).Addr().Is4() {
		return unix.AF_INET
	}

	return unix.AF_INET6
}

// disconnect is connect(2) to AF_UNSPEC.
func disconnect(fd int) error {
	var unspecified unix.RawSockaddr
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd),
		uintptr(unsafe.Pointer(&unspecified)), unsafe.Sizeof(unspecified))
	if errno != 0 {
		return errno
	}

	return nil
}
