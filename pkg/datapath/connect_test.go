package datapath

import (
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// A client connects to a backend, and sees the address of the Service.
func TestTranslation(t *testing.T) {
	w := newWorld(t)
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{"10.96.0.1:80"}, to: w.all4()})
		w.add(t, service{proto: proto, at: []string{"[fd00:96::1]:80"}, to: w.all6()})
	}

	for _, test := range []struct {
		name        string
		network     string
		dial        string
		unconnected bool
	}{
		{"a TCP connection", "tcp4", "10.96.0.1:80", false},
		{"a TCP connection over IPv6", "tcp6", "[fd00:96::1]:80", false},
		{"a TCP connection of an IPv6 socket to an IPv4 Service", "tcp6", "[::ffff:10.96.0.1]:80", false},
		{"a connected UDP socket", "udp4", "10.96.0.1:80", false},
		{"a connected UDP socket over IPv6", "udp6", "[fd00:96::1]:80", false},
		{"a connected UDP socket of IPv6 to an IPv4 Service", "udp6", "[::ffff:10.96.0.1]:80", false},
		{"a datagram", "udp4", "10.96.0.1:80", true},
		{"a datagram over IPv6", "udp6", "[fd00:96::1]:80", true},
		{"a datagram of an IPv6 socket to an IPv4 Service", "udp6", "[::ffff:10.96.0.1]:80", true},
	} {
		for where, client := range map[string]*lab.Caller{"a pod": w.pod(t), "the node": w.host(t)} {
			t.Run(test.name+" from "+where, func(t *testing.T) {
				reply, err := client.Exchange(lab.Exchange{
					Network: test.network, Address: test.dial, Unconnected: test.unconnected,
				})
				lab.Must(t, err)
				answer := mustAnswer(t, reply.Text)
				if !slices.Contains(append(w.all4(), w.all6()...), answer.Local.String()) {
					t.Errorf("answered at %s, want a backend", answer.Local)
				}
				vip := netip.MustParseAddrPort(test.dial)
				if !test.unconnected && reply.Peer != vip {
					t.Errorf("getpeername: %s, want %s", reply.Peer, vip)
				}
				if test.network[:3] == "udp" && reply.From != vip {
					t.Errorf("recvfrom: %s, want %s", reply.From, vip)
				}
			})
		}
	}
}

func mustAnswer(t testing.TB, text string) lab.Answer {
	t.Helper()
	answer, err := lab.ParseAnswer(text)
	lab.Must(t, err)

	return answer
}

// An IPv6 socket may name an IPv4 address in an IPv4 sockaddr.
func TestIPv4AddressOnIPv6Socket(t *testing.T) {
	w := newWorld(t)
	w.add(t, service{proto: "udp", at: []string{"10.96.0.1:80"}, to: w.all4()})
	client, mapped := w.pod(t), netip.MustParseAddrPort("[::ffff:10.96.0.1]:80")

	t.Run("connected", func(t *testing.T) {
		s := mustSocket(t, client, "udp6")
		lab.Must(t, s.Connect("10.96.0.1:80"))
		if peer, err := s.Peer(); err != nil || peer != mapped {
			t.Errorf("getpeername: %s, %v, want %s", peer, err, mapped)
		}
		if _, from := ask(t, s, ""); from != mapped {
			t.Errorf("recvfrom: %s, want %s", from, mapped)
		}
	})
	t.Run("sent", func(t *testing.T) {
		if _, from := ask(t, mustSocket(t, client, "udp6"), "10.96.0.1:80"); from != mapped {
			t.Errorf("recvfrom: %s, want %s", from, mapped)
		}
	})
}

func mustSocket(t testing.TB, c *lab.Caller, network string) *lab.Socket {
	t.Helper()
	s, err := c.Socket(network)
	lab.Must(t, err)

	return s
}

// ask sends one question, to an address unless s is connected, and returns the name of
// the backend that answered, and the address of the answer as the client sees it.
func ask(t testing.TB, s *lab.Socket, to string) (name string, from netip.AddrPort) {
	t.Helper()
	var err error
	if to == "" {
		err = s.Send("who\n")
	} else {
		err = s.SendTo("who\n", to)
	}
	lab.Must(t, err)

	return hear(t, s)
}

// hear receives one answer.
func hear(t testing.TB, s *lab.Socket) (name string, from netip.AddrPort) {
	t.Helper()
	text, from, err := s.Recv()
	lab.Must(t, err)

	return mustAnswer(t, text[:len(text)-1]).Name, from
}

// A second connect() of a socket makes it forget the first.
func TestReconnect(t *testing.T) {
	w := newWorld(t)
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{"10.96.0.1:80"}, to: []string{w.v4(0)}})
		w.add(t, service{proto: proto, at: []string{"10.96.0.2:80"}, to: []string{w.v4(1)}})
		w.add(t, service{proto: proto, at: []string{"10.96.0.9:80"}})
		w.add(t, service{proto: proto, at: []string{"10.96.0.8:80"}, to: []string{"10.244.1.2:1"}})
	}
	client := w.pod(t)

	for _, test := range []struct {
		name   string
		second string
		answer string
	}{
		{"with another Service", "10.96.0.2:80", "green"},
		{"with no Service", w.v4(1), "green"},
		{"with the backend itself", w.v4(0), "red"},
		{"with a Service that has no backend", "10.96.0.9:80", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := mustSocket(t, client, "udp4")
			lab.Must(t, s.Connect("10.96.0.1:80"), s.Connect(test.second))
			if peer, err := s.Peer(); err != nil || peer.String() != test.second {
				t.Errorf("getpeername: %s, %v, want %s", peer, err, test.second)
			}
			if test.answer == "" {
				return
			}
			if name, from := ask(t, s, ""); name != test.answer || from.String() != test.second {
				t.Errorf("%s answered from %s, want %s from %s", name, from, test.answer, test.second)
			}
		})
	}
	t.Run("with TCP after a refusal", func(t *testing.T) {
		s := mustSocket(t, client, "tcp4")
		for _, refused := range []string{"10.96.0.9:80", "10.96.0.8:80"} { // by us, by the backend
			if err := connectAnew(s, refused); lab.Errno(err) != unix.ECONNREFUSED {
				t.Fatalf("connect to %s: %v, want %v", refused, err, unix.ECONNREFUSED)
			}
		}
		lab.Must(t, connectAnew(s, w.v4(1)))
		if peer, err := s.Peer(); err != nil || peer.String() != w.v4(1) {
			t.Errorf("getpeername: %s, %v, want %s", peer, err, w.v4(1))
		}
	})
	t.Run("with the backend after a disconnect", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		lab.Must(t, s.Connect("10.96.0.1:80"), s.Disconnect())
		if _, from := ask(t, s, w.v4(0)); from.String() != w.v4(0) {
			t.Errorf("recvfrom: %s, want %s", from, w.v4(0))
		}
	})
}

// connectAnew connects once more. The kernel may first return the result of the connect
// before, which went on in the background.
func connectAnew(s *lab.Socket, to string) error {
	err := s.Connect(to)
	if lab.Errno(err) == unix.ECONNABORTED {
		err = s.Connect(to)
	}

	return err
}
