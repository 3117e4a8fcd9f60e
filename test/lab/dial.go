package lab

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Listen opens a TCP listener inside the namespace. Accept it from anywhere.
func (ns *Namespace) Listen(network, address string) (listener net.Listener, err error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false) // Go's default would be an MPTCP socket
	err = ns.Do(func() error {
		listener, err = config.Listen(context.Background(), network, address)
		return err
	})

	return listener, err
}

// ListenPacket opens a UDP socket or, as "ip4:132", a raw one inside the namespace,
// which reports with every datagram where it was sent to.
func (ns *Namespace) ListenPacket(network, address string) (conn net.PacketConn, err error) {
	config := net.ListenConfig{Control: func(network, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			if network != "ip6" { // udp6 may be both
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			}
			if err == nil && (network == "udp6" || network == "ip6") {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
			}
		})
		return errors.Join(controlErr, err)
	}}
	err = ns.Do(func() error {
		conn, err = config.ListenPacket(context.Background(), network, address)
		return err
	})

	return conn, err
}

// Dial connects from inside the namespace. The socket is this process's: hooks
// on a cgroup of the lab do not see it, a [Caller]'s they do.
func (ns *Namespace) Dial(network, address string, timeout time.Duration) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: timeout}
	dialer.SetMultipathTCP(false)
	err = ns.Do(func() error {
		conn, err = dialer.Dial(network, address)
		return err
	})

	return conn, err
}
