package datapath

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// loaded is a world with services whose backends behave in different ways, each
// of TCP and UDP.
type loaded struct {
	*world
	client *lab.Caller
	at     map[string]*service // by protocol and behaviour
}

// The addresses of the services of a loaded world, by behaviour of their backends.
var behaviours = map[string]string{
	"answers":     "10.96.0.1:80",
	"other":       "10.96.0.2:80",
	"refuses":     "10.96.0.3:80",
	"is silent":   "10.96.0.4:80",
	"unreachable": "10.96.0.5:80",
	"no backend":  "10.96.0.6:80",
	"v6":          "[fd00:96::1]:80",
}

func newLoaded(t testing.TB) *loaded {
	t.Helper()
	l := &loaded{world: newWorld(t), at: make(map[string]*service)}
	l.client = l.pod(t)
	backends := map[string][]string{
		"answers": {l.v4(0)}, "other": {l.v4(1)}, "v6": {l.v6(0)},
		"refuses":     {strings.Replace(l.v4(0), ":8080", ":1", 1)},
		"is silent":   {"198.51.100.9:80"}, // the gateway drops it
		"unreachable": {"224.0.0.1:80"},    // connect fails before there is a SYN
		"no backend":  nil,
	}
	for _, proto := range []string{"tcp", "udp"} {
		for how, at := range behaviours {
			l.at[proto+" "+how] = l.add(t, service{proto: proto, at: []string{at}, to: backends[how]})
		}
	}

	return l
}

// mustHave waits until the backend of a service has so many connections, and no
// other of its protocol any.
func (l *loaded) mustHave(t testing.TB, n int, of string) {
	t.Helper()
	var have string
	lab.Eventually(t, fmt.Sprintf("%d connections of %s", n, of), func() bool {
		have = ""
		for name, s := range l.at {
			for _, id := range s.backends {
				if live := l.load(id); live != 0 {
					have += fmt.Sprintf("%d %s;", live, name)
				}
			}
		}

		return n == 0 && have == "" || have == fmt.Sprintf("%d %s;", n, of)
	})
}

// mustKeep checks that the backend of a service has so many connections, and no other
// any, after a connection to another backend has begun and ended: a wrong count would
// show by then.
func (l *loaded) mustKeep(t testing.TB, n int, of string) {
	t.Helper()
	s := mustSocket(t, l.client, "udp4")
	lab.Must(t, s.Connect(behaviours["other"]), s.Close())
	l.mustHave(t, n, of)
}

// A TCP socket counts from its connect() until it is closed.
func TestLoadOfTCP(t *testing.T) {
	l := newLoaded(t)
	for _, family := range []string{"4", "6"} {
		how := map[string]string{"4": "answers", "6": "v6"}[family]
		dial := func(t *testing.T) *lab.Socket {
			t.Helper()
			s := mustSocket(t, l.client, "tcp"+family)
			lab.Must(t, s.Connect(behaviours[how]))
			l.mustHave(t, 1, "tcp "+how)

			return s
		}
		t.Run("until the client closes, IPv"+family, func(t *testing.T) {
			s := dial(t)
			ask(t, s, "")
			l.mustKeep(t, 1, "tcp "+how)
			lab.Must(t, s.Close())
			l.mustHave(t, 0, "")
		})
		t.Run("until the client closes after the server, IPv"+family, func(t *testing.T) {
			s := dial(t)
			lab.Must(t, s.Send("bye\n"))
			hear(t, s)
			if rest, _, err := s.Recv(); rest != "" || err != nil {
				t.Fatalf("%q, %v, want the end", rest, err)
			}
			l.mustKeep(t, 1, "tcp "+how)
			lab.Must(t, s.Close())
			l.mustHave(t, 0, "")
		})
		t.Run("each on its own, IPv"+family, func(t *testing.T) {
			var open []*lab.Socket
			for n := range 5 {
				s := mustSocket(t, l.client, "tcp"+family)
				lab.Must(t, s.Connect(behaviours[how]))
				open = append(open, s)
				l.mustHave(t, n+1, "tcp "+how)
			}
			for n, s := range open {
				lab.Must(t, s.Close())
				l.mustHave(t, 4-n, "tcp "+how)
			}
		})
	}
}

// A connect counts until the socket is closed, whether it succeeds or fails, and no longer.
func TestLoadOfFailedConnects(t *testing.T) {
	l := newLoaded(t)
	l.needsErrors(t)
	for _, test := range []struct {
		how  string
		err  unix.Errno
		live int // until the socket is closed
	}{
		{"refuses", unix.ECONNREFUSED, 1},
		{"unreachable", unix.ENETUNREACH, 1},
		{"no backend", unix.ECONNREFUSED, 0},
		{"is silent", unix.ETIMEDOUT, 1},
	} {
		t.Run(test.how, func(t *testing.T) {
			s := mustSocket(t, l.client, "tcp4")
			lab.Must(t, s.SetTimeout(200*time.Millisecond))
			if err := s.Connect(behaviours[test.how]); lab.Errno(err) != test.err {
				t.Fatalf("connect: %v, want %v", err, test.err)
			}
			l.mustKeep(t, test.live, "tcp "+test.how)
			lab.Must(t, s.Close())
			l.mustHave(t, 0, "")
		})
	}
	t.Run("given up by the kernel", func(t *testing.T) {
		s := mustSocket(t, l.client, "tcp4")
		lab.Must(t, s.SetOption(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 300), s.SetTimeout(20*time.Second))
		if err := s.Connect(behaviours["is silent"]); lab.Errno(err) != unix.ETIMEDOUT {
			t.Fatalf("connect: %v, want %v", err, unix.ETIMEDOUT)
		}
		l.mustKeep(t, 1, "tcp is silent")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
}

// A connect of a socket that is connected or connecting changes nothing: applications
// use it to find out whether they are connected.
func TestLoadOfRepeatedConnects(t *testing.T) {
	l := newLoaded(t)
	for _, again := range []string{"answers", "other", "no backend"} {
		t.Run("connected, and "+again, func(t *testing.T) {
			s := mustSocket(t, l.client, "tcp4")
			lab.Must(t, s.Connect(behaviours["answers"]))
			mustBeConnected(t, s, behaviours[again])
			l.mustKeep(t, 1, "tcp answers")
			if peer, err := s.Peer(); err != nil || peer.String() != behaviours["answers"] {
				t.Errorf("getpeername: %s, %v, want %s", peer, err, behaviours["answers"])
			}
			lab.Must(t, s.Close())
			l.mustHave(t, 0, "")
		})
	}
	t.Run("connected, and no Service", func(t *testing.T) {
		s := mustSocket(t, l.client, "tcp4")
		lab.Must(t, s.Connect(behaviours["answers"]))
		mustBeConnected(t, s, l.v4(2))
		l.mustKeep(t, 1, "tcp answers")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("connecting", func(t *testing.T) {
		s := mustSocket(t, l.client, "tcp4")
		lab.Must(t, s.SetTimeout(100*time.Millisecond))
		for range 3 {
			if err := s.Connect(behaviours["is silent"]); err == nil {
				t.Error("there is an answer")
			}
			l.mustKeep(t, 1, "tcp is silent")
		}
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("after a disconnect", func(t *testing.T) {
		s := mustSocket(t, l.client, "tcp4")
		for _, how := range []string{"answers", "other", "answers"} {
			lab.Must(t, s.Connect(behaviours[how]))
			l.mustHave(t, 1, "tcp "+how)
			lab.Must(t, s.Disconnect())
		}
		l.mustHave(t, 1, "tcp answers")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("after a refusal", func(t *testing.T) {
		s := mustSocket(t, l.client, "tcp4")
		if err := s.Connect(behaviours["refuses"]); lab.Errno(err) != unix.ECONNREFUSED {
			t.Fatalf("connect: %v, want %v", err, unix.ECONNREFUSED)
		}
		lab.Must(t, connectAnew(s, behaviours["answers"]))
		l.mustHave(t, 1, "tcp answers")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
}

// mustBeConnected connects a socket that is connected: a connect that did not block
// succeeds once more.
func mustBeConnected(t testing.TB, s *lab.Socket, to string) {
	t.Helper()
	for _, want := range []unix.Errno{0, unix.EISCONN} {
		if err := s.Connect(to); lab.Errno(err) != want {
			t.Errorf("connect to %s: %v, want %v", to, err, want)
		}
	}
}

// A UDP socket counts from the moment it dials until it is closed, or connects to another.
func TestLoadOfUDP(t *testing.T) {
	l := newLoaded(t)
	t.Run("connected", func(t *testing.T) {
		s := mustSocket(t, l.client, "udp4")
		for _, how := range []string{"answers", "answers", "other", "refuses"} {
			lab.Must(t, s.Connect(behaviours[how]))
			l.mustHave(t, 1, "udp "+how)
		}
		lab.Must(t, s.Connect(l.v4(2))) // no Service
		l.mustHave(t, 0, "")
		lab.Must(t, s.Connect(behaviours["answers"]))
		ask(t, s, "")
		l.mustKeep(t, 1, "udp answers")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("connected over IPv6", func(t *testing.T) {
		s := mustSocket(t, l.client, "udp6")
		lab.Must(t, s.Connect(behaviours["v6"]))
		l.mustHave(t, 1, "udp v6")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("connected to a Service without a backend", func(t *testing.T) {
		s := mustSocket(t, l.client, "udp4")
		lab.Must(t, s.Connect(behaviours["answers"]))
		l.mustHave(t, 1, "udp answers")
		lab.Must(t, s.Connect(behaviours["no backend"]))
		l.mustHave(t, 0, "")
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
	t.Run("of datagrams", func(t *testing.T) {
		s := mustSocket(t, l.client, "udp4")
		for range 3 {
			ask(t, s, behaviours["answers"])
			l.mustHave(t, 1, "udp answers")
		}
		ask(t, s, behaviours["other"])
		for _, how := range []string{"answers", "other"} {
			if n := l.load(l.at["udp "+how].backends[0]); n != 1 {
				t.Errorf("%d connections of udp %s, want 1", n, how)
			}
		}
		lab.Must(t, s.Close())
		l.mustHave(t, 0, "")
	})
}

// The connections of a process that is killed do not count any more.
func TestLoadOfKilledProcess(t *testing.T) {
	l := newLoaded(t)
	client := l.pod(t)
	for _, network := range []string{"tcp4", "tcp4", "tcp4", "udp4"} {
		s := mustSocket(t, client, network)
		lab.Must(t, s.Connect(behaviours["answers"]))
	}
	dead := mustSocket(t, client, "tcp4")
	lab.Must(t, dead.SetTimeout(50*time.Millisecond))
	if err := dead.Connect(behaviours["is silent"]); err == nil {
		t.Error("there is an answer")
	}
	for of, want := range map[string]int{"tcp answers": 3, "udp answers": 1, "tcp is silent": 1} {
		if have := l.load(l.at[of].backends[0]); have != want {
			t.Errorf("%s: %d connections, want %d", of, have, want)
		}
	}
	lab.Must(t, client.Close())
	l.mustHave(t, 0, "")
}
