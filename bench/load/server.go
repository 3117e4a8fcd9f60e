package load

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Server is a process that answers in a namespace, at all addresses that are the
// namespace's own, those of AnyIP routes included:
//
//	ip route add local 100.64.0.0/12 dev lo
type Server struct{ process *process }

// Serve starts a server, TCP and UDP, and returns when it listens. Of the connections it serves 96 at
// a time. The caller closes it.
func Serve(ns *lab.Namespace, port uint16) (*Server, error) {
	p, err := startRole(ns, nil, "server", serverThreads)
	if err != nil {
		return nil, err
	}
	if err := p.awaitReady(port); err != nil {
		return nil, fmt.Errorf("serve port %d: %w", port, err)
	}

	return &Server{process: p}, nil
}

// Pause stops the server until [Server.Resume]: requests wait
// meanwhile. One that merely has nothing to do still takes a percent of a processor.
func (s *Server) Pause() error { return s.signal(unix.SIGSTOP) }

// Resume lets a paused server go on.
func (s *Server) Resume() error { return s.signal(unix.SIGCONT) }

func (s *Server) signal(signal unix.Signal) error {
	if err := s.process.cmd.Process.Signal(signal); err != nil {
		return fmt.Errorf("signal server: %w", err)
	}

	return nil
}

// Close ends the server with all its connections. Closing twice is not an error.
func (s *Server) Close() error { return s.process.close() }

// Own makes all addresses of a prefix the namespace's own (AnyIP), as
//
//	ip route add local 100.64.0.0/12 dev lo
//
// does: servers on the wildcard address answer at each of them. Others need a
// route to there.
func Own(ns *lab.Namespace, prefix netip.Prefix) error {
	lo, err := ns.Netlink().LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo of %s: %w", ns.Name(), err)
	}
	to, err := netlink.ParseIPNet(prefix.String())
	if err != nil {
		return err
	}
	route := &netlink.Route{
		Dst: to, LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST,
	}
	if err := ns.Netlink().RouteReplace(route); err != nil {
		return fmt.Errorf("own %s in %s: %w", prefix, ns.Name(), err)
	}

	return nil
}

const (
	// How many connections are served at a time, each by a thread of its own, so that
	// clients do not wait for each other. More connections wait.
	conversations = 96
	// How many threads wait for a connection, in turn: few, so that what the one
	// that is woken needs is still in the cache.
	acceptors = 4
	// How many answer datagrams.
	answerers = 2

	// All of them, and the one that reads stdin.
	serverThreads = conversations + answerers + 1

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
	tcp, err := listen(unix.SOCK_STREAM, port)
	if err != nil {
		return err
	}
	turns, err := unix.Eventfd(acceptors, unix.EFD_SEMAPHORE|unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	l := &listener{fd: tcp, turns: turns}
	for range conversations {
		go l.serve()
	}
	udp, err := listen(unix.SOCK_DGRAM, port)
	if err != nil {
		return err
	}
	for range answerers {
		go answerDatagrams(udp)
	}
	if _, err := fmt.Fprintln(stdout, ready); err != nil {
		return err
	}
	exitAtEnd()

	return nil
}

// listen returns a socket on the wildcard address. What a TCP socket accepts has its options, too.
func listen(kind int, port uint16) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	options := [][3]int{{unix.IPPROTO_IP, unix.IP_PKTINFO, 1}}
	if kind == unix.SOCK_STREAM {
		options = [][3]int{
			{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
			{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			{unix.IPPROTO_TCP, unix.TCP_DEFER_ACCEPT, requestTimeout},
		}
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			return -1, fmt.Errorf("set option %d of socket: %w", o[1], err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: int(port)}); err != nil {
		return -1, fmt.Errorf("bind port %d: %w", port, err)
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.Listen(fd, backlog); err != nil {
			return -1, fmt.Errorf("listen on port %d: %w", port, err)
		}
	}

	return fd, nil
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
		if l.idle.Add(-1) == 0 { // another thread may accept, if there is one
			turn := uint64(1)
			_, _, _ = unix.RawSyscall(unix.SYS_WRITE, uintptr(l.turns), uintptr(unsafe.Pointer(&turn)), unsafe.Sizeof(turn))
		}
		converse(int(r), request, answer)
		closeSocket(int(r))
		l.idle.Add(1)
	}
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

// localAddress is where a connection arrived, nil if the kernel does not tell.
func localAddress(fd int) []byte {
	var local sockaddr
	size := uint32(unix.SizeofSockaddrInet4)
	_, _, errno := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&local)), uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return nil
	}

	return local.Addr[:]
}

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
		Name:    (*byte)(unsafe.Pointer(&d.client)),
		Namelen: unix.SizeofSockaddrInet4,
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

// arrivedAt is the request's destination, nil if the kernel did not report it. It makes the control part
// fit for the answer: any device may send it.
func (d *datagrams) arrivedAt() []byte {
	header := (*unix.Cmsghdr)(unsafe.Pointer(&d.control))
	if header.Level != unix.IPPROTO_IP || header.Type != unix.IP_PKTINFO {
		return nil
	}
	info := (*unix.Inet4Pktinfo)(unsafe.Add(unsafe.Pointer(&d.control), unix.CmsgLen(0)))
	info.Ifindex, info.Spec_dst = 0, info.Addr

	return info.Addr[:]
}

// A request begins with a header, which its response repeats:
//
//	byte  0     the kind: askSize, askLast or askAddress
//	      1     0
//	      2-3   size of the request, header included
//	      4-5   size of the response, header included
//	      6-9   number of the request
//
// Numbers are big endian. The rest is zeros, but that the response to askAddress
// continues with the 4 bytes of the address at which the request arrived.
const (
	headerSize  = 10
	addressSize = headerSize + 4
	// Those of [Work]. A request goes in one packet, so that no algorithm of TCP holds a part back.
	requestSize, responseSize = 64, 128
	// Those that a server takes. Its buffers are so large that threads share no cache line.
	maxRequest, maxResponse = 1024, 65000
)

const (
	askSize    = 's' // an answer of that size, no more
	askLast    = 'l' // the same, and then the end of the connection
	askAddress = 'w' // the address of the server
)

// newRequest returns a request with the number 0.
func newRequest(ask byte, size, answer int) []byte {
	request := make([]byte, size)
	request[0] = ask
	binary.BigEndian.PutUint16(request[2:], uint16(size))
	binary.BigEndian.PutUint16(request[4:], uint16(answer))

	return request
}

func setNumber(request []byte, number uint32) { binary.BigEndian.PutUint32(request[6:], number) }

// sizes reads from a header how large the request and its response are. It is
// false if this is no request.
func sizes(header []byte) (request, response int, ok bool) {
	request = int(binary.BigEndian.Uint16(header[2:]))
	response = int(binary.BigEndian.Uint16(header[4:]))
	least := headerSize
	if header[0] == askAddress {
		least = addressSize
	}
	ok = (header[0] == askSize || header[0] == askLast || header[0] == askAddress) &&
		request >= headerSize && request <= maxRequest && response >= least && response <= maxResponse

	return request, response, ok
}
