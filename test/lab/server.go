package lab

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
)

// Server answers questions over TCP and UDP with an [Answer]. It runs in this
// process, only its sockets are in the namespace; so it is in no cgroup of the
// lab, and socket hooks there do not see it.
//
// A question is a line (over TCP) or a datagram:
//
//	who        the answer, at once; so is anything else
//	size N     the answer, padded to N bytes
//	wait 50ms  the answer, after a while
//	bye        the answer, and the end of the connection
type Server struct {
	Name string

	addr        netip.AddrPort
	connections atomic.Int64
	answers     atomic.Int64
	serving     sync.WaitGroup

	stopped chan struct{}

	mu      sync.Mutex
	closers map[closer]struct{} // nil when stopped
}

// closer is a socket of a server.
type closer interface{ Close() error }

// Serve starts a server in the namespace: at each address for TCP and for UDP,
// or for one of them: "10.244.1.2:8080", "tcp/[fd00::1]:80", "udp/0.0.0.0:53".
// With port 0 the kernel chooses. A nil namespace is that of the calling thread. The
// caller stops it.
func Serve(ns *Namespace, name string, addresses ...string) (*Server, error) {
	s := &Server{Name: name, stopped: make(chan struct{}), closers: make(map[closer]struct{})}
	for _, address := range addresses {
		if err := s.listen(ns, address); err != nil {
			return nil, errors.Join(fmt.Errorf("server %s: %w", name, err), s.Stop())
		}
	}

	return s, nil
}

// Addr is the first address, with the port that the kernel chose.
func (s *Server) Addr() netip.AddrPort { return s.addr }

// Connections is how many TCP connections were accepted so far.
func (s *Server) Connections() int { return int(s.connections.Load()) }

// Answers is how many questions were answered so far.
func (s *Server) Answers() int { return int(s.answers.Load()) }

// Stop closes all sockets, as if the server had died, and waits until they are.
// Stopping twice is not an error.
func (s *Server) Stop() error {
	s.mu.Lock()
	if s.closers != nil {
		close(s.stopped)
	}
	var err error
	for closer := range s.closers {
		err = errors.Join(err, closer.Close())
	}
	s.closers = nil
	s.mu.Unlock()
	s.serving.Wait()

	return err
}

// Close is [Server.Stop].
func (s *Server) Close() error { return s.Stop() }

// watch notes a socket, so that Stop closes it. It is false, and the socket
// closed, if the server has stopped.
func (s *Server) watch(socket closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closers == nil {
		_ = socket.Close() // we did not want it
		return false
	}
	s.closers[socket] = struct{}{}

	return true
}

func (s *Server) unwatch(socket closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.closers[socket]; ok {
		delete(s.closers, socket)
		_ = socket.Close() // the client's loss
	}
}

func (s *Server) listen(ns *Namespace, address string) error {
	network, address, one := strings.Cut(address, "/")
	if !one {
		network, address = "", network
	}
	if network != "" && network != "tcp" && network != "udp" {
		return fmt.Errorf("unknown network %q", network)
	}
	if network != "udp" {
		listener, err := ns.Listen("tcp", address)
		if err != nil {
			return err
		}
		address = listener.Addr().String() // UDP takes the same port
		s.watch(listener)
		s.serving.Go(func() { s.accept(listener) })
	}
	if network != "tcp" {
		conn, err := ns.ListenPacket("udp", address)
		if err != nil {
			return err
		}
		address = conn.LocalAddr().String()
		s.watch(conn)
		s.serving.Go(func() { s.answerDatagrams(conn.(*net.UDPConn)) })
	}
	if !s.addr.IsValid() {
		addr, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		s.addr = addr
	}

	return nil
}

func (s *Server) accept(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return // stopped
		}
		s.connections.Add(1)
		if s.watch(conn) {
			s.serving.Go(func() { s.answerLines(conn) })
		}
	}
}

func (s *Server) answerLines(conn net.Conn) {
	defer s.unwatch(conn)

	me := Answer{Name: s.Name, Local: unmapped(conn.LocalAddr()), Client: unmapped(conn.RemoteAddr())}
	lines := bufio.NewReader(conn)
	for more := true; more; {
		question, err := lines.ReadString('\n')
		if err != nil {
			return
		}
		var line []byte
		line, more = me.answerTo(question, s.stopped)
		s.answers.Add(1)
		if _, err := conn.Write(line); err != nil {
			return
		}
	}
}

// answerDatagrams answers each datagram from the address that it was sent to,
// which a socket bound to no address would not do by itself.
func (s *Server) answerDatagrams(conn *net.UDPConn) {
	bound := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	buffer, control := make([]byte, maxDatagram), make([]byte, 128)
	for {
		size, controlSize, _, client, err := conn.ReadMsgUDPAddrPort(buffer, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error for an earlier answer
		}
		to, source := PacketInfo(control[:controlSize])
		if !to.IsValid() {
			to = bound.Addr()
		}
		question := string(buffer[:size])
		s.serving.Go(func() {
			me := Answer{
				Name:   s.Name,
				Local:  netip.AddrPortFrom(to.Unmap(), bound.Port()),
				Client: netip.AddrPortFrom(client.Addr().Unmap(), client.Port()),
			}
			line, _ := me.answerTo(question, s.stopped)
			s.answers.Add(1)
			// Like any datagram, an answer may get lost.
			_, _, _ = conn.WriteMsgUDPAddrPort(line, source, client)
		})
	}
}
