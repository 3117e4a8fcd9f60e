package load

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of the measured loop, without anything of the runtime around
// them: a thread that blocks in one blocks, as it does in C. Errors are errnos; a
// time-out is always ETIMEDOUT.

// timeout is how long a client waits in one system call.
const timeout = time.Second

func openSocket(kind int) (fd int, errno syscall.Errno) {
	r, _, errno := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, uintptr(kind|unix.SOCK_CLOEXEC), 0)

	return int(r), errno
}

// setTimeouts limits how long connect and send, and receive, may take.
func setTimeouts(fd int, limit *unix.Timeval) syscall.Errno {
	for _, option := range [...]uintptr{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		errno := setOption(fd, unix.SOL_SOCKET, option, unsafe.Pointer(limit), unsafe.Sizeof(*limit))
		if errno != 0 {
			return errno
		}
	}

	return 0
}

func setOption(fd int, level, option uintptr, value unsafe.Pointer, size uintptr) syscall.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), level, option, uintptr(value), size, 0)

	return errno
}

func connectSocket(fd int, to *sockaddr) syscall.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet4)
	if errno == unix.EINPROGRESS {
		return unix.ETIMEDOUT
	}

	return errno
}

func bindSocket(fd int, to *sockaddr) syscall.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet4)

	return errno
}

// send sends the whole buffer, to the connected peer or, if to is not nil, to that
// address.
func send(fd int, what []byte, to *sockaddr) syscall.Errno {
	var address unsafe.Pointer
	var size uintptr
	if to != nil {
		address, size = unsafe.Pointer(to), unix.SizeofSockaddrInet4
	}
	for len(what) > 0 {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&what[0])),
			uintptr(len(what)), unix.MSG_NOSIGNAL, uintptr(address), size)
		if errno != 0 {
			return timeOut(errno)
		}
		what = what[n:]
	}

	return 0
}

// receive reads what has arrived. If from is not nil, it becomes the address of
// the sender. 0 bytes without an error are the end of a connection.
func receive(fd int, into []byte, from *sockaddr) (int, syscall.Errno) {
	var address, size unsafe.Pointer
	length := uint32(unix.SizeofSockaddrInet4)
	if from != nil {
		address, size = unsafe.Pointer(from), unsafe.Pointer(&length)
	}
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&into[0])),
			uintptr(len(into)), 0, uintptr(address), uintptr(size))
		switch errno {
		case 0:
			return int(n), 0
		case unix.EINTR: // the process was stopped meanwhile, and goes on
		default:
			return 0, timeOut(errno)
		}
	}
}

// receiveAll fills a buffer from a connection. The end of the connection before
// that is ENODATA.
func receiveAll(fd int, into []byte) syscall.Errno {
	for len(into) > 0 {
		n, errno := receive(fd, into, nil)
		if errno != 0 {
			return errno
		}
		if n == 0 {
			return unix.ENODATA
		}
		into = into[n:]
	}

	return 0
}

// read reads from a file; 0 bytes without an error are its end.
func read(fd int, into []byte) (int, syscall.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&into[0])), uintptr(len(into)))
	if errno != 0 {
		return 0, errno
	}

	return int(n), 0
}

func closeSocket(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

func timeOut(errno syscall.Errno) syscall.Errno {
	if errno == unix.EAGAIN {
		return unix.ETIMEDOUT
	}

	return errno
}

// pause lets the thread sleep.
func pause(d time.Duration) {
	if d <= 0 {
		return
	}
	left := unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall6(unix.SYS_CLOCK_NANOSLEEP, unix.CLOCK_MONOTONIC, 0,
		uintptr(unsafe.Pointer(&left)), 0, 0, 0)
}

// wakeInTime makes the kernel wake this thread when it is time, and not, to save
// power, up to 50 µs later.
func wakeInTime() error { return unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0) }

// sockaddr is an address as the kernel takes it, made once.
type sockaddr = unix.RawSockaddrInet4

func newSockaddr(target netip.AddrPort) sockaddr {
	port := binary.BigEndian.AppendUint16(nil, target.Port())

	return sockaddr{Family: unix.AF_INET, Port: binary.NativeEndian.Uint16(port), Addr: target.Addr().As4()}
}

// addrPortOf is the way back.
func addrPortOf(s *sockaddr) netip.AddrPort {
	port := binary.NativeEndian.AppendUint16(nil, s.Port)

	return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), binary.BigEndian.Uint16(port))
}

// resetAtClose makes close end the connection with an RST.
func resetAtClose(fd int) syscall.Errno {
	now := unix.Linger{Onoff: 1}

	return setOption(fd, unix.SOL_SOCKET, unix.SO_LINGER, unsafe.Pointer(&now), unsafe.Sizeof(now))
}
