package load

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// sockaddr is an address as the kernel takes it, made once.
type sockaddr struct {
	bytes  [unix.SizeofSockaddrInet6]byte
	size   uint32
	family int
}

func newSockaddr(target netip.AddrPort) sockaddr {
	s := sockaddr{size: unix.SizeofSockaddrInet4, family: unix.AF_INET}
	address := target.Addr().AsSlice()
	at := 4
	if !target.Addr().Is4() {
		s.size, s.family = unix.SizeofSockaddrInet6, unix.AF_INET6
		at = 8 // behind the flow label
	}
	binary.NativeEndian.PutUint16(s.bytes[:], uint16(s.family))
	binary.BigEndian.PutUint16(s.bytes[2:], target.Port())
	copy(s.bytes[at:], address)

	return s
}

// addrPort is the way back.
func (s *sockaddr) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(s.bytes[2:])
	if binary.NativeEndian.Uint16(s.bytes[:]) == unix.AF_INET6 {
		return netip.AddrPortFrom(netip.AddrFrom16([16]byte(s.bytes[8:24])), port)
	}

	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s.bytes[4:8])), port)
}

// is reports whether both are the same address and port.
func (s *sockaddr) is(other *sockaddr) bool {
	if other.family == unix.AF_INET {
		return [8]byte(s.bytes[:8]) == [8]byte(other.bytes[:8])
	}

	// Without the flow label.
	return [4]byte(s.bytes[:4]) == [4]byte(other.bytes[:4]) && [16]byte(s.bytes[8:24]) == [16]byte(other.bytes[8:24])
}
