package datapath

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// served is a TCP service whose one backend is a socket of the test.
type served struct {
	*loaded
	listener *lab.Socket
}

const servedAt = "10.96.0.9:80"

func newServed(t testing.TB) *served {
	t.Helper()
	l := newLoaded(t)
	pod := l.answers[0]
	at := netip.AddrPortFrom(pod.IPv4, 9090).String()
	l.at["tcp served"] = l.add(t, service{proto: "tcp", at: []string{servedAt}, to: []string{at}})
	listener := mustSocket(t, lab.MustCaller(t, pod.Namespace, nil), "tcp4")
	lab.Must(t, listener.Bind(at), listener.Listen(10))

	return &served{l, listener}
}

func (s *served) mustAccept(t testing.TB) *lab.Socket {
	t.Helper()
	accepted, _, err := s.listener.Accept()
	lab.Must(t, err)

	return accepted
}

// A connection may end in other ways than by the client closing it.
func TestLoadOfBrokenConnections(t *testing.T) {
	s := newServed(t)
	t.Run("reset by the server", func(t *testing.T) {
		client := mustSocket(t, s.client, "tcp4")
		lab.Must(t, client.Connect(servedAt))
		server := s.mustAccept(t)
		lab.Must(t, client.Send("unread\n"))
		s.mustKeep(t, 1, "tcp served")
		lab.Eventually(t, "something to read", func() bool { return s.unread(t, len("unread\n")) })
		lab.Must(t, server.Close())
		s.mustKeep(t, 1, "tcp served") // the client's socket is still open
		lab.Must(t, client.Close())
		s.mustHave(t, 0, "")
	})
	t.Run("reset by the client", func(t *testing.T) {
		resetting := s.start(t, s.world.client.Namespace, "reset", servedAt)
		if printed := resetting.line(t); printed != "connected" {
			t.Fatal(printed)
		}
		server := s.mustAccept(t)
		s.mustKeep(t, 1, "tcp served")
		resetting.rest(t)
		s.mustHave(t, 0, "")
		if _, _, err := server.Recv(); lab.Errno(err) != unix.ECONNRESET {
			t.Errorf("the server's error is %v, want %v", err, unix.ECONNRESET)
		}
	})
	t.Run("half closed", func(t *testing.T) {
		half := s.start(t, s.world.client.Namespace, "half close", servedAt)
		if printed := half.line(t); printed != "half closed" {
			t.Fatal(printed)
		}
		server := s.mustAccept(t)
		if text, _, err := server.Recv(); text != "" || err != nil {
			t.Fatalf("%q, %v, want the end", text, err)
		}
		s.mustKeep(t, 1, "tcp served") // the server may go on
		lab.Must(t, server.Send("and more"))
		s.mustKeep(t, 1, "tcp served")
		lab.Must(t, server.Close())
		s.mustKeep(t, 1, "tcp served") // the client's socket is still open
		half.rest(t)
		s.mustHave(t, 0, "")
	})
	t.Run("held by another process", func(t *testing.T) {
		shared := s.start(t, s.world.client.Namespace, "hand on", servedAt)
		if printed := shared.line(t); printed != "handed on" {
			t.Fatal(printed)
		}
		server := s.mustAccept(t)
		s.mustKeep(t, 1, "tcp served")
		shared.rest(t)
		lab.Must(t, server.Close())
		s.mustHave(t, 0, "")
	})
}

// unread reports whether a connection of red has so many bytes to read.
func (s *served) unread(t testing.TB, bytes int) bool {
	t.Helper()
	var table []byte
	lab.MustDo(t, s.answers[0].Namespace, func() (err error) {
		table, err = os.ReadFile("/proc/thread-self/net/tcp")

		return err
	})

	return strings.Contains(string(table), fmt.Sprintf(" 01 00000000:%08X ", bytes)) // established
}

// Sockets that connect in uncommon ways count, too, and count once.
func TestLoadOfUncommonSockets(t *testing.T) {
	l := newLoaded(t)
	for _, scene := range []string{"fast open", "multipath", "non-blocking connect", "inherit", "listen after connect"} {
		t.Run(scene, func(t *testing.T) {
			other := mustSocket(t, l.client, "tcp4")
			lab.Must(t, other.Connect(behaviours["other"]))
			before := l.countOf(t, l.at["tcp answers"].id) + l.countOf(t, l.at["udp answers"].id) + l.countOf(t, l.at["tcp refuses"].id)
			printed := l.play(t, l.world.client.Namespace, scene, behaviours["answers"], behaviours["refuses"])
			if strings.HasPrefix(printed, "skip: ") {
				t.Skip(printed)
			}
			after := l.countOf(t, l.at["tcp answers"].id) + l.countOf(t, l.at["udp answers"].id) + l.countOf(t, l.at["tcp refuses"].id)
			if after == before {
				t.Errorf("nothing was translated: %s", printed)
			}
			l.mustHave(t, 1, "tcp other")
			lab.Must(t, other.Close())
			l.mustHave(t, 0, "")
		})
	}
}

// Connections that live while the programs are replaced end in the new ones.
func TestLoadAcrossReplacement(t *testing.T) {
	l := newLoaded(t)
	tcp, udp, silent := mustSocket(t, l.client, "tcp4"), mustSocket(t, l.client, "udp4"), mustSocket(t, l.client, "tcp4")
	lab.Must(t, tcp.Connect(behaviours["answers"]), udp.Connect(behaviours["answers"]), silent.SetTimeout(50*time.Millisecond))
	if err := silent.Connect(behaviours["is silent"]); err == nil {
		t.Error("there is an answer")
	}
	next := l.mustOpen(t, l.cfg)
	lab.Must(t, next.Attach())
	for of, want := range map[string]int{"tcp answers": 1, "udp answers": 1, "tcp is silent": 1} {
		if have := next.Maps().Loads.Load(l.at[of].backends[0]).Live(); have != want {
			t.Errorf("%s: %d connections, want %d", of, have, want)
		}
	}
	lab.Must(t, silent.Close(), udp.Close())
	l.mustHave(t, 1, "tcp answers")
	ask(t, tcp, "")
	lab.Must(t, tcp.Close())
	l.mustHave(t, 0, "")
}

// The statistics of each service port are the outcomes of new flows, and the bytes of TCP
// sockets when they are closed.
func TestStats(t *testing.T) {
	l := newLoaded(t)
	l.needsErrors(t)
	restricted := l.add(t, service{proto: "tcp", at: []string{"10.96.0.8:80"}, to: []string{l.v4(0)}, ranges: []string{"203.0.113.0/24"}})
	socket := mustSocket(t, l.client, "tcp4")
	lab.Must(t, socket.Connect(behaviours["answers"]))
	question := strings.Repeat("q", 300000) + "\n"
	lab.Must(t, socket.Send(question))
	received := 0
	for text := ""; !strings.HasSuffix(text, "\n"); received += len(text) {
		var err error
		text, _, err = socket.Recv()
		lab.Must(t, err)
	}
	s := l.at["tcp answers"]
	if now := l.stats(t, s.id); now[maps.StatBytesSent] != 0 {
		t.Errorf("before the end, %v is counted", now)
	}
	lab.Must(t, socket.Close())
	l.mustHave(t, 0, "")
	for range 3 {
		_, _ = l.client.Request("tcp4", behaviours["no backend"])
		_, _ = l.client.Request("tcp4", "10.96.0.8:80")
		_, _ = l.client.Request("udp4", behaviours["other"])
	}
	datagrams := mustSocket(t, l.client, "udp4")
	for range 4 {
		ask(t, datagrams, behaviours["answers"]) // one flow
	}

	have := l.stats(t, s.id)
	// SYN and FIN may count as one byte each.
	sent, got := have[maps.StatBytesSent]-uint64(len(question)), have[maps.StatBytesReceived]-uint64(received)
	if sent > 2 || got > 2 || have[uint32(maps.ReasonTranslated)] != 1 {
		t.Errorf("%v is counted, want %d bytes sent and %d received, of one flow", have, len(question), received)
	}
	for _, test := range []struct {
		of   *service
		what maps.Reason
		want uint64
	}{
		{l.at["tcp no backend"], maps.ReasonRejectNoBackend, 3},
		{restricted, maps.ReasonDropSourceRange, 3},
		{l.at["udp other"], maps.ReasonTranslated, 3},
		{l.at["udp answers"], maps.ReasonTranslated, 1},
	} {
		have := l.stats(t, test.of.id)
		if len(have) != 1 || have[uint32(test.what)] != test.want {
			t.Errorf("%s: %v is counted, want %d times %s", test.of.at[0], have, test.want, test.what)
		}
	}
}

// Without stats nothing is counted, but loads are.
func TestNoStats(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.NoStats = true })
	s := w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: []string{w.v4(0)}})
	socket := mustSocket(t, w.pod(t), "tcp4")
	lab.Must(t, socket.Connect("10.96.0.1:80"))
	w.mustRest(t, s, 1)
	lab.Must(t, socket.Close())
	w.mustRest(t, s, 0)
	if have := w.stats(t, s.id); len(have) > 0 {
		t.Errorf("%v is counted", have)
	}
}

func dialScene(at string) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return 0, err
	}

	return fd, unix.Connect(fd, sockaddr(at))
}

// sceneReset closes a connection to args[0] by a reset.
func sceneReset(args []string) (string, error) {
	fd, err := dialScene(args[0])
	if err != nil {
		return "", err
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return "", err
	}
	pause("connected")

	return "", unix.Close(fd)
}

// sceneHalfClose shuts down its side of a connection to args[0], and keeps reading.
func sceneHalfClose(args []string) (string, error) {
	fd, err := dialScene(args[0])
	if err != nil {
		return "", err
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return "", err
	}
	pause("half closed")

	return "", unix.Close(fd)
}

// sceneHandOn hands a connection to args[0] over to another process.
func sceneHandOn(args []string) (string, error) {
	if args[0] == "held" {
		_, err := io.Copy(io.Discard, os.Stdin)

		return "", err
	}
	fd, err := dialScene(args[0])
	if err != nil {
		return "", err
	}
	child := exec.Command("/proc/self/exe", "held")
	socket := os.NewFile(uintptr(fd), "socket")
	child.ExtraFiles = []*os.File{socket}
	in, err := child.StdinPipe()
	if err != nil {
		return "", err
	}
	if err := child.Start(); err != nil {
		return "", err
	}
	if err := socket.Close(); err != nil {
		return "", err
	}
	pause("handed on")
	if err := in.Close(); err != nil {
		return "", err
	}

	return "", child.Wait()
}
