package load

import (
	"encoding/json"
	"fmt"
	"io"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The server prints this line when it listens.
const listening = "listening"

const (
	// How many connections of a family are served at a time, each by a thread of its
	// own, so that clients do not wait for each other. More connections wait.
	conversations4, conversations6 = 96, 16
	// How many threads wait for a connection, in turn: few, so that what the one
	// that is woken needs is still in the cache.
	acceptors = 4
	// How many answer datagrams of a family.
	answerers = 2

	// All of them, and the one that reads stdin.
	serverThreads = conversations4 + conversations6 + 2*answerers + 1

	backlog = 4096
	// A connection is accepted when its first request is there, or after so many
	// seconds. Otherwise the handshake would wake a thread, on the processor of the
	// client, and what the clock of a connect shows would be how the kernel schedules
	// the two.
	requestTimeout = 1
)

// serve is the server's process. It returns only if it cannot serve.
func serve(stdin io.Reader, stdout io.Writer) error {
	var port uint16
	if err := json.NewDecoder(stdin).Decode(&port); err != nil {
		return fmt.Errorf("read port: %w", err)
	}
	conversations := map[int]int{unix.AF_INET: conversations4, unix.AF_INET6: conversations6}
	for family, threads := range conversations {
		if err := serveTCP(family, port, threads); err != nil {
			return err
		}
		fd, err := listen(family, unix.SOCK_DGRAM, port)
		if err != nil {
			return err
		}
		for range answerers {
			go answerDatagrams(fd)
		}
	}
	if _, err := fmt.Fprintln(stdout, listening); err != nil {
		return err
	}
	exitAtEnd()

	return nil
}

// serveTCP starts threads that serve connections.
func serveTCP(family int, port uint16, threads int) error {
	fd, err := listen(family, unix.SOCK_STREAM, port)
	if err != nil {
		return err
	}
	turns, err := unix.Eventfd(acceptors, unix.EFD_SEMAPHORE|unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	l := &listener{fd: fd, turns: turns}
	for range threads {
		go l.serve()
	}

	return nil
}

// listen returns a socket on the wildcard address of a family.
func listen(family, kind int, port uint16) (int, error) {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	var address unix.Sockaddr = &unix.SockaddrInet4{Port: int(port)}
	if family == unix.AF_INET6 {
		address = &unix.SockaddrInet6{Port: int(port)}
	}
	if err := prepareToListen(fd, family, kind); err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, address); err != nil {
		return -1, fmt.Errorf("bind port %d: %w", port, err)
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.Listen(fd, backlog); err != nil {
			return -1, fmt.Errorf("listen on port %d: %w", port, err)
		}
	}

	return fd, nil
}

// prepareToListen sets options, those of a TCP socket for what it accepts, too.
func prepareToListen(fd, family, kind int) error {
	type option struct{ level, name, value int }
	var options []option
	if family == unix.AF_INET6 {
		options = append(options, option{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1})
	}
	switch {
	case kind == unix.SOCK_STREAM:
		options = append(options,
			option{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
			option{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			option{unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, requestTimeout})
	case family == unix.AF_INET:
		options = append(options, option{unix.IPPROTO_IP, unix.IP_PKTINFO, 1})
	default:
		// Answers come from addresses that no device has, which in IPv6 has to be allowed.
		options = append(options,
			option{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1},
			option{unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set option %d of socket: %w", o.name, err)
		}
	}

	return nil
}

// listener is a listening TCP socket with the threads that serve it. A thread
// first waits for its turn to accept connections, which it gets when all others that
// had one are in conversation, and keeps.
type listener struct {
	fd    int
	turns int          // eventfd: how many may begin to accept
	idle  atomic.Int32 // how many wait for a connection
}

// serve serves one connection after the other, each to its end.
func (l *listener) serve() {
	request, answer := make([]byte, maxRequest), make([]byte, maxResponse)
	var turn [8]byte
	for n := 0; n != len(turn); {
		n, _ = read(l.turns, turn[:])
	}
	l.idle.Add(1)
	for {
		r, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(l.fd), 0, 0, unix.SOCK_CLOEXEC, 0, 0)
		if errno != 0 {
			if errno != unix.ECONNABORTED {
				pause(time.Millisecond) // no files, or no memory
			}

			continue
		}
		if l.idle.Add(-1) == 0 {
			l.giveTurn()
		}
		converse(int(r), request, answer)
		closeSocket(int(r))
		l.idle.Add(1)
	}
}

// giveTurn lets another thread accept connections, if there is one.
func (l *listener) giveTurn() {
	turn := uint64(1)
	_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(l.turns), uintptr(unsafe.Pointer(&turn)), unsafe.Sizeof(turn))
}

// converse answers the requests of one connection until it ends.
func converse(fd int, request, answer []byte) {
	for have := 0; ; {
		n, errno := receive(fd, request[have:], nil)
		if errno != 0 || n == 0 {
			return
		}
		have += n
		if have < headerSize {
			continue
		}
		size, response, ok := sizes(request)
		if !ok || have > size {
			return // not our protocol: a client sends one request at a time
		}
		if have < size {
			continue
		}
		if request[0] == askAddress {
			copy(answer[headerSize:addressSize], localAddress(fd))
		}
		copy(answer[:headerSize], request)
		if errno := send(fd, answer[:response], nil); errno != 0 {
			return
		}
		if request[0] == askLast {
			return
		}
		clear(answer[:min(response, addressSize)])
		have = 0
	}
}

// localAddress is where a connection arrived, 16 bytes.
func localAddress(fd int) []byte {
	var local sockaddr
	local.size = uint32(len(local.bytes))
	_, _, errno := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd),
		uintptr(unsafe.Pointer(&local.bytes)), uintptr(unsafe.Pointer(&local.size)))
	if errno != 0 {
		return nil
	}
	address := local.addrPort().Addr().As16()

	return address[:]
}
