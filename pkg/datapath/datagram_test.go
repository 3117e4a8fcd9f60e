package datapath

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

const dns, time1, time2, log, trace = "10.96.0.1:53", "10.96.0.2:123", "10.96.0.3:123", "10.96.0.4:514", "10.96.0.5:4317"

// newDatagramWorld has five UDP services: two of them share two backends, and
// two of them share one.
func newDatagramWorld(t testing.TB) *world {
	t.Helper()
	w := newWorld(t)
	w.add(t, service{proto: "udp", at: []string{dns}, to: w.all4()})
	w.add(t, service{proto: "udp", at: []string{time1}, to: []string{w.v4(0), w.v4(1)}})
	w.add(t, service{proto: "udp", at: []string{time2}, to: []string{w.v4(0), w.v4(1)}})
	w.add(t, service{proto: "udp", at: []string{log}, to: []string{w.v4(2)}})
	w.add(t, service{proto: "udp", at: []string{trace}, to: []string{w.v4(2)}})

	return w
}

// Unconnected sockets send each datagram to a Service, and keep a backend of it.
func TestDatagrams(t *testing.T) {
	w := newDatagramWorld(t)
	client := w.pod(t)

	t.Run("kept together", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		first, _ := ask(t, s, dns)
		for range 50 {
			if name, from := ask(t, s, dns); name != first || from.String() != dns {
				t.Fatalf("%s answered from %s, want %s from %s", name, from, first, dns)
			}
		}
	})
	t.Run("spread, socket by socket", func(t *testing.T) {
		names := make(map[string]int)
		for range 60 {
			name, _ := ask(t, mustSocket(t, client, "udp4"), dns)
			names[name]++
		}
		if len(names) != len(colours) {
			t.Errorf("answers came from %v, want all of %v", names, colours)
		}
	})
	t.Run("apart, Service by Service", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		for range 5 {
			for _, to := range []string{dns, time1, log} {
				if _, from := ask(t, s, to); from.String() != to {
					t.Fatalf("recvfrom: %s, want %s", from, to)
				}
			}
		}
	})
	t.Run("apart, by different backends when two Services share them", func(t *testing.T) {
		for range 10 {
			s := mustSocket(t, client, "udp4")
			lab.Must(t, s.SendTo("who\n", time1), s.SendTo("who\n", time2))
			one, from1 := hear(t, s)
			two, from2 := hear(t, s)
			if one == two || from1 == from2 {
				t.Errorf("%s answered from %s and %s from %s", one, from1, two, from2)
			}
		}
	})
	t.Run("from the last Service when two share one backend", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		for range 3 {
			for _, to := range []string{log, trace} {
				if _, from := ask(t, s, to); from.String() != to {
					t.Fatalf("recvfrom: %s, want %s", from, to)
				}
			}
		}
	})
}

// Sockets that send datagrams may be connected, send to a backend itself, or be corked.
func TestDatagramsAmongOthers(t *testing.T) {
	w := newDatagramWorld(t)
	client := w.pod(t)

	t.Run("from the connected backend when the socket is connected, too", func(t *testing.T) {
		for range 20 {
			s := mustSocket(t, client, "udp4")
			lab.Must(t, s.Connect(dns))
			if _, from := ask(t, s, dns); from.String() != dns {
				t.Fatalf("recvfrom: %s, want %s", from, dns)
			}
		}
	})
	t.Run("untouched to a backend itself", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		ask(t, s, log)
		if name, from := ask(t, s, w.v4(2)); name != "blue" || from.String() != w.v4(2) {
			t.Errorf("%s answered from %s, want blue from %s", name, from, w.v4(2))
		}
		if _, from := ask(t, s, log); from.String() != log {
			t.Errorf("recvfrom: %s, want %s again", from, log)
		}
	})
	t.Run("from the Service again after a connect elsewhere", func(t *testing.T) {
		s := mustSocket(t, client, "udp4")
		ask(t, s, log)
		lab.Must(t, s.Connect(w.v4(0)), s.Disconnect())
		if _, from := ask(t, s, log); from.String() != log {
			t.Errorf("recvfrom: %s, want %s", from, log)
		}
	})
	t.Run("one, when it is corked", func(t *testing.T) {
		if got, want := w.play(t, w.client.Namespace, "cork", log), "blue from "+log; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	})
}

// sceneCork makes one datagram to args[0] of two calls.
func sceneCork(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	to := sockaddr(args[0])
	if err := unix.Sendto(fd, []byte("w"), unix.MSG_MORE, to); err != nil {
		return "", err
	}
	if err := unix.Sendto(fd, []byte("ho\n"), 0, to); err != nil {
		return "", err
	}
	b := make([]byte, 200)
	n, from, err := unix.Recvfrom(fd, b, 0)
	if err != nil {
		return "", err
	}
	answer, err := lab.ParseAnswer(string(b[:n-1]))

	return answer.Name + " from " + addrPort(from).String(), err
}

func TestUDPModes(t *testing.T) {
	t.Parallel() // it waits for answers that do not come
	for _, test := range []struct {
		name       string
		mode       bpf.UDPMode
		translated bool
	}{
		{"off", bpf.UDPOff, false},
		{"all", bpf.UDPAll, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.UDP = test.mode })
			w.add(t, service{proto: "tcp", at: []string{"10.96.0.1:80"}, to: w.all4()})
			w.add(t, service{proto: "udp", at: []string{"10.96.0.1:80"}, to: w.all4()})
			client := w.pod(t)
			answered := func(network string, unconnected bool) bool {
				_, err := client.Exchange(lab.Exchange{
					Network: network, Address: "10.96.0.1:80", Unconnected: unconnected, Timeout: 300 * time.Millisecond,
				})

				return err == nil
			}
			if !answered("tcp4", false) {
				t.Error("TCP is not translated")
			}
			counted := w.counted(t, func() {
				if got := answered("udp4", false); got != test.translated {
					t.Errorf("connected socket answered: %v, want %v", got, test.translated)
				}
				if got := answered("udp4", true); got != test.translated {
					t.Errorf("datagram answered: %v, want %v", got, test.translated)
				}
			})
			passed := counted[maps.ReasonPassDisabled] > 0
			if want := !test.translated; passed != want {
				t.Errorf("counted as passed: %v, want %v", passed, want)
			}
		})
	}
}
