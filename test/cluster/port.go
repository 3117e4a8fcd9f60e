package cluster

import (
	"testing"

	"golang.org/x/sys/unix"
)

// mustReservePort returns a TCP port of 127.0.0.1 that nobody else gets before
// the test ends, not even as the source port of a connection. A socket that is
// bound but does not listen holds it; a server of the same user can bind there
// if it sets SO_REUSEPORT too.
func mustReservePort(t testing.TB) int {
	t.Helper()

	port, err := func() (int, error) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return 0, err
		}
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return 0, err
		}
		address, err := unix.Getsockname(fd)
		if err != nil {
			return 0, err
		}
		return address.(*unix.SockaddrInet4).Port, nil
	}()
	if err != nil {
		t.Fatalf("reservation of a port: %v", err)
	}

	return port
}
