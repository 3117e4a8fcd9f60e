package cluster

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// port is a TCP port of 127.0.0.1 that no other process gets before it is closed, not
// even as the source port of a connection. A socket that is bound but does not
// listen holds it; a server of the same user can bind there if it sets
// SO_REUSEPORT too.
type port struct {
	number int
	fd     int // -1 when closed
}

// reservePort reserves a free port. The caller closes it.
func reservePort() (*port, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reservation of a port: %w", err)
	}
	p := &port{fd: fd}
	if err := p.bind(); err != nil {
		return nil, errors.Join(fmt.Errorf("reservation of a port: %w", err), p.close())
	}

	return p, nil
}

func (p *port) bind() error {
	if err := unix.SetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return err
	}
	if err := unix.Bind(p.fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return err
	}
	address, err := unix.Getsockname(p.fd)
	if err != nil {
		return err
	}
	p.number = address.(*unix.SockaddrInet4).Port

	return nil
}

// close gives the port back. Closing twice is not an error.
func (p *port) close() error {
	if p.fd < 0 {
		return nil
	}
	fd := p.fd
	p.fd = -1

	return unix.Close(fd)
}
