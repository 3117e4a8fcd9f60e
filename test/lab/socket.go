package lab

import (
	"net/netip"
	"time"
)

// Socket is a socket in a [Caller]'s process. Every method is one system call
// there, and errors wrap its [unix.Errno]. What takes longer than the timeout
// (2 s, see [Socket.SetTimeout]) ends with ETIMEDOUT.
//
// The family of an address is that of its text: "[::ffff:10.0.0.1]:80" is a
// v4-mapped address for a tcp6 or udp6 socket.
type Socket struct {
	caller *Caller
	number int
}

// Socket makes a socket. Network is one of tcp4, tcp6, udp4 and udp6.
func (c *Caller) Socket(network string) (*Socket, error) {
	answer, err := c.call(call{Act: actSocket, Network: network})
	if err != nil {
		return nil, err
	}

	return &Socket{caller: c, number: answer.Socket}, nil
}

func (s *Socket) call(call call) (answer, error) {
	call.Socket = s.number

	return s.caller.call(call)
}

func (s *Socket) do(call call) error {
	_, err := s.call(call)

	return err
}

// SetTimeout sets how long each further call may take.
func (s *Socket) SetTimeout(timeout time.Duration) error {
	return s.do(call{Act: actTimeout, Timeout: timeout})
}

// Bind is bind(2).
func (s *Socket) Bind(address string) error {
	return s.do(call{Act: actBind, Address: address})
}

// Connect is connect(2).
func (s *Socket) Connect(address string) error {
	return s.do(call{Act: actConnect, Address: address})
}

// Disconnect is connect(2) to AF_UNSPEC: a UDP socket forgets its peer.
func (s *Socket) Disconnect() error {
	return s.do(call{Act: actDisconnect})
}

// Listen is listen(2).
func (s *Socket) Listen(backlog int) error {
	return s.do(call{Act: actListen, Value: backlog})
}

// Accept is accept(2). It returns the new socket and its peer.
func (s *Socket) Accept() (*Socket, netip.AddrPort, error) {
	answer, err := s.call(call{Act: actAccept})
	if err != nil {
		return nil, netip.AddrPort{}, err
	}

	return &Socket{caller: s.caller, number: answer.Socket}, answer.Address, nil
}

// Send is send(2), until all bytes are sent.
func (s *Socket) Send(text string) error {
	return s.do(call{Act: actSend, Bytes: []byte(text)})
}

// SendTo is sendto(2).
func (s *Socket) SendTo(text, address string) error {
	return s.do(call{Act: actSend, Bytes: []byte(text), Address: address})
}

// Recv is recvfrom(2): a datagram, or some of a stream, and the sender's address. The
// sender is zero for TCP. The end of a stream is no text and no error.
func (s *Socket) Recv() (text string, from netip.AddrPort, err error) {
	answer, err := s.call(call{Act: actRecv})

	return string(answer.Bytes), answer.Address, err
}

// Peer is getpeername(2).
func (s *Socket) Peer() (netip.AddrPort, error) {
	answer, err := s.call(call{Act: actPeer})

	return answer.Address, err
}

// Local is getsockname(2).
func (s *Socket) Local() (netip.AddrPort, error) {
	answer, err := s.call(call{Act: actLocal})

	return answer.Address, err
}

// SetOption is setsockopt(2) of an integer.
func (s *Socket) SetOption(level, option, value int) error {
	return s.do(call{Act: actSetOption, Level: level, Option: option, Value: value})
}

// Option is getsockopt(2) of an integer.
func (s *Socket) Option(level, option int) (int, error) {
	answer, err := s.call(call{Act: actOption, Level: level, Option: option})

	return int(answer.Value), err
}

// Cookie is the kernel's number for the socket (SO_COOKIE), as
// bpf_get_socket_cookie returns it.
func (s *Socket) Cookie() (uint64, error) {
	answer, err := s.call(call{Act: actCookie})

	return answer.Value, err
}

// Close is close(2).
func (s *Socket) Close() error {
	return s.do(call{Act: actClose})
}
