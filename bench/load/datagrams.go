package load

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// datagrams is what one thread needs to answer datagrams: a message as it comes,
// with where it came from and, in its control part, where it arrived.
type datagrams struct {
	fd      int
	request [maxRequest]byte
	answer  [maxResponse]byte
	client  sockaddr
	control [8]uint64 // aligned as the kernel wants it
	part    unix.Iovec
	message unix.Msghdr
}

// answerDatagrams answers each request from the address at which it arrived, so
// that a host with many addresses is as good as many hosts.
func answerDatagrams(fd int) {
	d := &datagrams{fd: fd}
	for {
		n, ok := d.receive()
		if !ok || n < headerSize {
			continue
		}
		size, response, ok := sizes(d.request[:])
		arrivedAt := d.arrivedAt()
		if !ok || n != size || arrivedAt == nil {
			continue
		}
		copy(d.answer[:headerSize], d.request[:])
		if d.request[0] == askAddress {
			copy(d.answer[headerSize:], arrivedAt)
		}
		d.send(response)
		clear(d.answer[:addressSize])
	}
}

func (d *datagrams) receive() (n int, ok bool) {
	d.part.Base = &d.request[0]
	d.part.SetLen(len(d.request))
	d.message = unix.Msghdr{
		Name:    &d.client.bytes[0],
		Namelen: uint32(len(d.client.bytes)),
		Iov:     &d.part,
		Control: (*byte)(unsafe.Pointer(&d.control)),
	}
	d.message.SetIovlen(1)
	d.message.SetControllen(int(unsafe.Sizeof(d.control)))
	r, errno := d.call(unix.SYS_RECVMSG)

	return int(r), errno == 0
}

// send sends an answer back, with the control part that the request came with:
// the kernel uses the address at which the request arrived as the source of the answer.
func (d *datagrams) send(size int) {
	d.part.Base = &d.answer[0]
	d.part.SetLen(size)
	// An answer that cannot be sent is one that is not received.
	_, _ = d.call(unix.SYS_SENDMSG)
}

func (d *datagrams) call(number uintptr) (uintptr, syscall.Errno) {
	r, _, errno := unix.RawSyscall(number, uintptr(d.fd), uintptr(unsafe.Pointer(&d.message)), 0)

	return r, errno
}

// arrivedAt is the request's destination, 16 bytes, nil if the kernel did not report it.
// It makes the control part fit for the answer: any device may send it.
func (d *datagrams) arrivedAt() []byte {
	header := (*unix.Cmsghdr)(unsafe.Pointer(&d.control))
	switch at := unix.CmsgLen(0); {
	case header.Level == unix.IPPROTO_IP && header.Type == unix.IP_PKTINFO:
		info := (*unix.Inet4Pktinfo)(unsafe.Add(unsafe.Pointer(&d.control), at))
		info.Ifindex, info.Spec_dst = 0, info.Addr

		return mapped(info.Addr)
	case header.Level == unix.IPPROTO_IPV6 && header.Type == unix.IPV6_PKTINFO:
		info := (*unix.Inet6Pktinfo)(unsafe.Add(unsafe.Pointer(&d.control), at))
		info.Ifindex = 0

		return info.Addr[:]
	default:
		return nil
	}
}

// mapped is the v4-mapped form of an address.
func mapped(address [4]byte) []byte {
	long := [16]byte{10: 0xff, 11: 0xff, 12: address[0], 13: address[1], 14: address[2], 15: address[3]}

	return long[:]
}
