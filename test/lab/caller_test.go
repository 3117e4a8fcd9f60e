package lab

import (
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair is a server and a caller in one namespace, the caller in a cgroup.
type pair struct {
	ns     *Namespace
	cgroup *Cgroup
	caller *Caller
	server *Server
}

func mustPair(t testing.TB) pair {
	t.Helper()
	p := pair{ns: MustNamespace(t, "pair"), cgroup: MustCgroup(t, "pair")}
	p.server = MustServe(t, p.ns, "echo", "127.0.0.1:8080", "[::1]:8080")
	p.caller = MustCaller(t, p.ns, p.cgroup)

	return p
}

func mustSocket(t testing.TB, caller *Caller, network string) *Socket {
	t.Helper()
	socket, err := caller.Socket(network)
	Must(t, err)

	return socket
}

func TestCallerIsInItsCgroup(t *testing.T) {
	p := mustPair(t)

	path, err := p.caller.Cgroup()
	Must(t, err)
	if want := "/" + filepath.Base(p.cgroup.Path()); path != want {
		t.Errorf("caller sees itself in %s, want %s", path, want)
	}
	pids, err := p.cgroup.Processes()
	Must(t, err)
	if !slices.Equal(pids, []int{p.caller.PID()}) {
		t.Errorf("cgroup has processes %v, want %d", pids, p.caller.PID())
	}
}

func TestCallerIsInANestedCgroup(t *testing.T) {
	cgroup := MustCgroup(t, "outer")
	inner, err := cgroup.Child("inner")
	Must(t, err)
	caller := MustCaller(t, nil, inner)

	path, err := caller.Cgroup()
	Must(t, err)
	if want := "/" + filepath.Base(cgroup.Path()) + "/inner"; path != want {
		t.Errorf("caller sees itself in %s, want %s", path, want)
	}
}

func TestExchange(t *testing.T) {
	p := mustPair(t)

	for _, test := range []struct {
		name     string
		exchange Exchange
		errno    unix.Errno
		client   string // that the server saw, "" for any
		peer     string
		from     string
	}{
		{"answered over TCP", Exchange{Network: "tcp4", Address: "127.0.0.1:8080"}, 0, "", "127.0.0.1:8080", ""},
		{"answered over TCP and IPv6", Exchange{Network: "tcp6", Address: "[::1]:8080"}, 0, "", "[::1]:8080", ""},
		{"answered over UDP", Exchange{Network: "udp4", Address: "127.0.0.1:8080"}, 0, "", "127.0.0.1:8080", "127.0.0.1:8080"},
		{"answered over UDP and IPv6", Exchange{Network: "udp", Address: "[::1]:8080"}, 0, "", "[::1]:8080", "[::1]:8080"},
		{"answered on a v4-mapped address", Exchange{Network: "tcp6", Address: "[::ffff:127.0.0.1]:8080"}, 0, "", "[::ffff:127.0.0.1]:8080", ""},
		{"answered without connect", Exchange{Network: "udp4", Address: "127.0.0.1:8080", Unconnected: true}, 0, "", "invalid AddrPort", "127.0.0.1:8080"},
		{"answered to the port it was bound to", Exchange{Network: "tcp4", Address: "127.0.0.1:8080", From: "127.0.0.2:999"}, 0, "127.0.0.2:999", "127.0.0.1:8080", ""},
		{"answered at length", Exchange{Network: "tcp4", Address: "127.0.0.1:8080", Question: "size 300000"}, 0, "", "127.0.0.1:8080", ""},
		{"refused over TCP", Exchange{Network: "tcp4", Address: "127.0.0.1:9"}, unix.ECONNREFUSED, "", "", ""},
		{"refused over UDP", Exchange{Network: "udp4", Address: "127.0.0.1:9"}, unix.ECONNREFUSED, "", "", ""},
		{"unreachable without a route", Exchange{Network: "tcp4", Address: "192.0.2.1:9"}, unix.ENETUNREACH, "", "", ""},
		{"late", Exchange{Network: "tcp4", Address: "127.0.0.1:8080", Question: "wait 1s", Timeout: 20 * time.Millisecond}, unix.ETIMEDOUT, "", "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			reply, err := p.caller.Exchange(test.exchange)
			if Errno(err) != test.errno {
				t.Fatalf("error is %v, want %v", err, test.errno)
			}
			if err != nil {
				return
			}
			answer, err := ParseAnswer(reply.Text)
			Must(t, err)
			if answer.Name != "echo" || test.client != "" && answer.Client.String() != test.client {
				t.Errorf("answer is %q, want one to %s", answer, test.client)
			}
			if got := reply.Peer.String(); got != test.peer {
				t.Errorf("peer is %s, want %s", got, test.peer)
			}
			if test.from != "" && reply.From.String() != test.from {
				t.Errorf("answer came from %s, want %s", reply.From, test.from)
			}
		})
	}
}

func TestServerCounts(t *testing.T) {
	p := mustPair(t)

	for _, network := range []string{"tcp4", "tcp4", "udp4"} {
		if _, err := p.caller.Request(network, "127.0.0.1:8080"); err != nil {
			t.Fatal(err)
		}
	}
	if p.server.Connections() != 2 || p.server.Answers() != 3 {
		t.Errorf("%d connections and %d answers, want 2 and 3", p.server.Connections(), p.server.Answers())
	}
}

func TestServerOnEveryAddressAnswersFromTheRightOne(t *testing.T) {
	p := mustPair(t)
	MustServe(t, p.ns, "everywhere", "0.0.0.0:53")
	MustServe(t, p.ns, "everywhere", "udp/[::]:54")

	for _, address := range []string{"127.0.0.7:53", "127.0.0.7:54", "[::1]:54"} {
		reply, err := p.caller.Exchange(Exchange{Network: "udp", Address: address, Unconnected: true})
		Must(t, err)
		if reply.From.String() != address {
			t.Errorf("asked %s, answered from %s", address, reply.From)
		}
	}
}

func TestStoppedServerRefusesAndHangsUp(t *testing.T) {
	p := mustPair(t)
	open := mustSocket(t, p.caller, "tcp4")
	Must(t, open.Connect("127.0.0.1:8080"))
	Must(t, open.Send("who\n"), p.server.Stop())

	if _, err := p.caller.Request("tcp4", "127.0.0.1:8080"); Errno(err) != unix.ECONNREFUSED {
		t.Errorf("new connection: %v, want ECONNREFUSED", err)
	}
	for {
		text, _, err := open.Recv()
		if text == "" {
			if err != nil && Errno(err) != unix.ECONNRESET {
				t.Errorf("open connection: %v, want its end", err)
			}
			return
		}
	}
}

func TestSocketListens(t *testing.T) {
	p := mustPair(t)
	listener, client := mustSocket(t, p.caller, "tcp4"), mustSocket(t, p.caller, "tcp4")
	if err := errors.Join(
		listener.SetOption(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		listener.Bind("127.0.0.1:7000"),
		listener.Listen(8),
		client.Connect("127.0.0.1:7000"),
	); err != nil {
		t.Fatal(err)
	}

	accepted, from, err := listener.Accept()
	Must(t, err)
	local, err := client.Local()
	if err != nil || local != from {
		t.Errorf("accepted from %s, client is %s (%v)", from, local, err)
	}
	Must(t, accepted.Send("hello"), accepted.Close())
	for _, want := range []string{"hello", ""} {
		if text, _, err := client.Recv(); text != want || err != nil {
			t.Errorf("received %q, %v, want %q", text, err, want)
		}
	}
}

func TestSocketDisconnects(t *testing.T) {
	p := mustPair(t)
	socket := mustSocket(t, p.caller, "udp4")
	Must(t, socket.Connect("127.0.0.1:8080"), socket.Disconnect())
	if _, err := socket.Peer(); Errno(err) != unix.ENOTCONN {
		t.Errorf("peer after disconnect: %v, want ENOTCONN", err)
	}
	Must(t, socket.SendTo("who", "127.0.0.1:8080"))
	if _, from, err := socket.Recv(); from.String() != "127.0.0.1:8080" || err != nil {
		t.Errorf("answer from %s, %v", from, err)
	}
}

func TestSocketReportsCookieAndOptions(t *testing.T) {
	socket := mustSocket(t, MustCaller(t, nil, nil), "udp6")
	if cookie, err := socket.Cookie(); cookie == 0 || err != nil {
		t.Errorf("cookie is %d, %v", cookie, err)
	}
	if kind, err := socket.Option(unix.SOL_SOCKET, unix.SO_TYPE); kind != unix.SOCK_DGRAM || err != nil {
		t.Errorf("type is %d, %v", kind, err)
	}
}

func TestSocketTimesOut(t *testing.T) {
	p := mustPair(t)
	socket := mustSocket(t, p.caller, "udp4")
	Must(t, socket.Bind("127.0.0.1:0"), socket.SetTimeout(10*time.Millisecond))
	if _, _, err := socket.Recv(); Errno(err) != unix.ETIMEDOUT {
		t.Errorf("receive: %v, want ETIMEDOUT", err)
	}
}

func TestSocketIsUnknownOnceClosed(t *testing.T) {
	socket := mustSocket(t, MustCaller(t, nil, nil), "tcp4")
	Must(t, socket.Close())
	if err := socket.Connect("127.0.0.1:8080"); Errno(err) != unix.EBADF {
		t.Errorf("connect after close: %v, want EBADF", err)
	}
}

func TestCallerThatIsKilledSaysSo(t *testing.T) {
	p := mustPair(t)
	Must(t, p.cgroup.Close())

	if _, err := p.caller.Request("tcp4", "127.0.0.1:8080"); !errors.Is(err, ErrCallerGone) {
		t.Errorf("error is %v, want ErrCallerGone", err)
	}
}

func BenchmarkCall(b *testing.B) {
	p := mustPair(b)
	socket := mustSocket(b, p.caller, "udp4")
	for b.Loop() {
		if _, err := socket.Local(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRequest(b *testing.B) {
	p := mustPair(b)
	for b.Loop() {
		if _, err := p.caller.Request("tcp4", "127.0.0.1:8080"); err != nil {
			b.Fatal(err)
		}
	}
}
