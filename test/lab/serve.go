package lab

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// callee is the process behind a [Caller]: it does what the calls ask for, on
// sockets that it keeps under numbers.
type callee struct {
	writing sync.Mutex
	out     *json.Encoder

	mu      sync.Mutex
	last    int
	sockets map[int]*rawSocket
	loads   map[int]*loadRun
}

// ServeCalls makes this process the one behind a [Caller]: it answers calls until there
// are no more.
func ServeCalls(in io.Reader, out io.Writer) error {
	c := &callee{
		out:     json.NewEncoder(out),
		sockets: make(map[int]*rawSocket),
		loads:   make(map[int]*loadRun),
	}
	calls := json.NewDecoder(bufio.NewReader(in))
	for {
		var call call
		err := calls.Decode(&call)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read call: %w", err)
		}
		go c.answer(call)
	}
}

func (c *callee) answer(call call) {
	answer, err := c.do(call)
	answer.ID, answer.Failure = call.ID, failureOf(err)

	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.out.Encode(answer); err != nil {
		// The process that calls has ended: end, as at the end of the calls.
		os.Exit(0)
	}
}

// do executes a call that needs no socket yet.
func (c *callee) do(call call) (answer answer, err error) {
	switch call.Act {
	case actSocket:
		answer.Socket, err = c.open(call)
	case actExchange:
		var reply Reply
		reply, err = call.Exchange.run()
		answer.Reply = &reply
	case actStartLoad:
		answer.Socket = c.startLoad(*call.Load)
	case actAwaitLoad, actStopLoad:
		answer.Report, err = c.endLoad(call.Socket, call.Act == actStopLoad)
	case actCgroup:
		answer.Bytes, err = os.ReadFile("/proc/self/cgroup")
	default:
		return c.doOn(call)
	}

	return answer, err
}

// doOn executes a call on a socket.
func (c *callee) doOn(call call) (answer answer, err error) {
	socket, err := c.socket(call.Socket)
	if err != nil {
		return answer, err
	}
	switch call.Act {
	case actBind:
		err = socket.bind(call.Address)
	case actConnect:
		err = socket.connect(call.Address)
	case actDisconnect:
		err = socket.disconnect()
	case actListen:
		err = socket.listen(call.Value)
	case actAccept:
		var accepted *rawSocket
		if accepted, answer.Address, err = socket.accept(); err == nil {
			answer.Socket = c.keep(accepted)
		}
	case actSend:
		err = socket.send(call.Bytes, call.Address)
	case actRecv:
		buffer := make([]byte, maxDatagram)
		var size int
		size, answer.Address, err = socket.recv(buffer)
		answer.Bytes = buffer[:size]
	case actPeer:
		answer.Address, err = socket.peer()
	case actLocal:
		answer.Address, err = socket.local()
	case actSetOption:
		err = socket.setOption(call.Level, call.Option, call.Value)
	case actOption:
		var value int
		value, err = socket.option(call.Level, call.Option)
		answer.Value = uint64(value)
	case actCookie:
		answer.Value, err = socket.cookie()
	case actTimeout:
		socket.timeout = call.Timeout
	case actClose:
		err = c.close(call.Socket)
	default:
		err = fmt.Errorf("unknown act %q", call.Act)
	}

	return answer, err
}

func (c *callee) open(call call) (int, error) {
	domain, kind, err := socketKind(call.Network, call.Address)
	if err != nil {
		return 0, err
	}
	socket, err := newRawSocket(domain, kind, call.Timeout)
	if err != nil {
		return 0, err
	}

	return c.keep(socket), nil
}

// number returns a number for something to be kept. The caller holds the lock.
func (c *callee) number() int {
	c.last++

	return c.last
}

func (c *callee) keep(socket *rawSocket) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	number := c.number()
	c.sockets[number] = socket

	return number
}

func (c *callee) socket(number int) (*rawSocket, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	socket, ok := c.sockets[number]
	if !ok {
		return nil, os.NewSyscallError("socket", unix.EBADF)
	}

	return socket, nil
}

func (c *callee) close(number int) error {
	c.mu.Lock()
	socket, ok := c.sockets[number]
	delete(c.sockets, number)
	c.mu.Unlock()
	if !ok {
		return os.NewSyscallError("close", unix.EBADF)
	}

	return socket.close()
}

// PacketInfo reads from a datagram's control messages where it was sent to, and
// returns the control message that sends the answer from there. Both are zero if
// the messages do not have.
func PacketInfo(control []byte) (to netip.Addr, source []byte) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.Addr{}, nil
	}
	for _, message := range messages {
		switch {
		case message.Header.Level == unix.IPPROTO_IP && message.Header.Type == unix.IP_PKTINFO &&
			len(message.Data) >= unix.SizeofInet4Pktinfo:
			info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&message.Data[0]))
			return netip.AddrFrom4(info.Addr), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: info.Addr})
		case message.Header.Level == unix.IPPROTO_IPV6 && message.Header.Type == unix.IPV6_PKTINFO &&
			len(message.Data) >= unix.SizeofInet6Pktinfo:
			info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&message.Data[0]))
			return netip.AddrFrom16(info.Addr), unix.PktInfo6(&unix.Inet6Pktinfo{Addr: info.Addr})
		}
	}

	return netip.Addr{}, nil
}

// unmapped turns an address of package net into one of netip, without v4-mapped
// ones.
func unmapped(addr net.Addr) netip.AddrPort {
	var addrPort netip.AddrPort
	switch addr := addr.(type) {
	case *net.TCPAddr:
		addrPort = addr.AddrPort()
	case *net.UDPAddr:
		addrPort = addr.AddrPort()
	}

	return netip.AddrPortFrom(addrPort.Addr().Unmap(), addrPort.Port())
}
