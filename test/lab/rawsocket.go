package lab

import (
	"errors"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How long an operation on a socket may take, by default.
const defaultTimeout = 2 * time.Second

// Enough for any datagram.
const maxDatagram = 1 << 16

// rawSocket is a socket in the caller's process. Every method is the one system
// call of its name, so that the hooks under test see what a program in C would
// show them: package net would add calls of its own. What takes longer than
// the timeout ends with ETIMEDOUT.
type rawSocket struct {
	file    *os.File
	raw     syscall.RawConn
	timeout time.Duration
}

func newRawSocket(domain, kind int, timeout time.Duration) (*rawSocket, error) {
	protocol := 0
	if kind == unix.SOCK_STREAM && processProfile.MPTCP {
		protocol = unix.IPPROTO_MPTCP
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}

	return wrapSocket(fd, timeout)
}

func wrapSocket(fd int, timeout time.Duration) (*rawSocket, error) {
	file := os.NewFile(uintptr(fd), "socket")
	raw, err := file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if timeout == 0 {
		timeout = defaultTimeout
	}

	return &rawSocket{file: file, raw: raw, timeout: timeout}, nil
}

// control makes a system call that does not wait.
func (s *rawSocket) control(name string, call func(fd int) error) (err error) {
	if controlErr := s.raw.Control(func(fd uintptr) { err = call(int(fd)) }); controlErr != nil {
		return controlErr
	}

	return os.NewSyscallError(name, err)
}

// read makes a system call that waits for input, write one that waits for room.
func (s *rawSocket) read(name string, call func(fd int) error) error {
	if err := s.file.SetReadDeadline(time.Now().Add(s.timeout)); err != nil {
		return err
	}

	return waitFor(s.raw.Read, name, call)
}

func (s *rawSocket) write(name string, call func(fd int) error) error {
	if err := s.file.SetWriteDeadline(time.Now().Add(s.timeout)); err != nil {
		return err
	}

	return waitFor(s.raw.Write, name, call)
}

func waitFor(ready func(func(fd uintptr) bool) error, name string, call func(fd int) error) (err error) {
	readyErr := ready(func(fd uintptr) bool {
		err = call(int(fd))
		return !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case errors.Is(readyErr, os.ErrDeadlineExceeded):
		err = unix.ETIMEDOUT
	case readyErr != nil:
		return readyErr
	}

	return os.NewSyscallError(name, err)
}

func (s *rawSocket) bind(address string) error {
	sa, err := sockaddrOf(address)
	if err != nil {
		return err
	}

	return s.control("bind", func(fd int) error { return unix.Bind(fd, sa) })
}

func (s *rawSocket) connect(address string) error {
	sa, err := sockaddrOf(address)
	if err != nil {
		return err
	}
	err = s.control("connect", func(fd int) error { return unix.Connect(fd, sa) })
	if !errors.Is(err, unix.EINPROGRESS) {
		return err
	}

	return s.write("connect", func(fd int) error {
		// The poller may still have the state from before the connect.
		ready, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0)
		if err != nil || ready == 0 {
			return unix.EAGAIN
		}
		errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		return err
	})
}

// disconnect dissolves a datagram socket's association, by connecting to no
// address family.
func (s *rawSocket) disconnect() error {
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}

	return s.control("connect", func(fd int) error {
		_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none))
		if errno != 0 {
			return errno
		}
		return nil
	})
}

func (s *rawSocket) listen(backlog int) error {
	return s.control("listen", func(fd int) error { return unix.Listen(fd, backlog) })
}

func (s *rawSocket) accept() (*rawSocket, netip.AddrPort, error) {
	var accepted int
	var from unix.Sockaddr
	err := s.read("accept", func(fd int) (err error) {
		accepted, from, err = unix.Accept4(fd, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		return err
	})
	if err != nil {
		return nil, netip.AddrPort{}, err
	}
	conn, err := wrapSocket(accepted, s.timeout)

	return conn, addrPortOf(from), err
}

// send sends all bytes. With an address it is sendto.
func (s *rawSocket) send(bytes []byte, address string) error {
	name, to := "send", unix.Sockaddr(nil)
	if address != "" {
		sa, err := sockaddrOf(address)
		if err != nil {
			return err
		}
		name, to = "sendto", sa
	}
	for first := true; first || len(bytes) > 0; first = false {
		err := s.write(name, func(fd int) error {
			sent, err := unix.SendmsgN(fd, bytes, nil, to, unix.MSG_NOSIGNAL)
			if err == nil {
				bytes = bytes[sent:]
			}
			return err
		})
		if err != nil {
			return err
		}
	}

	return nil
}

// recv receives what is there: a datagram, or some of a stream, whose end is no
// bytes at all.
func (s *rawSocket) recv(buffer []byte) (int, netip.AddrPort, error) {
	var size int
	var from unix.Sockaddr
	err := s.read("recvfrom", func(fd int) (err error) {
		size, from, err = unix.Recvfrom(fd, buffer, 0)
		return err
	})
	if err != nil {
		return 0, netip.AddrPort{}, err
	}

	return size, addrPortOf(from), nil
}

func (s *rawSocket) peer() (addr netip.AddrPort, err error) {
	err = s.control("getpeername", func(fd int) error {
		sa, err := unix.Getpeername(fd)
		addr = addrPortOf(sa)
		return err
	})

	return addr, err
}

func (s *rawSocket) local() (addr netip.AddrPort, err error) {
	err = s.control("getsockname", func(fd int) error {
		sa, err := unix.Getsockname(fd)
		addr = addrPortOf(sa)
		return err
	})

	return addr, err
}

func (s *rawSocket) setOption(level, option, value int) error {
	return s.control("setsockopt", func(fd int) error { return unix.SetsockoptInt(fd, level, option, value) })
}

func (s *rawSocket) option(level, option int) (value int, err error) {
	err = s.control("getsockopt", func(fd int) (err error) {
		value, err = unix.GetsockoptInt(fd, level, option)
		return err
	})

	return value, err
}

func (s *rawSocket) cookie() (value uint64, err error) {
	err = s.control("getsockopt", func(fd int) (err error) {
		value, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
		return err
	})

	return value, err
}

func (s *rawSocket) close() error { return s.file.Close() }
