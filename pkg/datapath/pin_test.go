package datapath

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// An unconnected UDP socket keeps the backend of a Service while datagrams flow.
func TestPins(t *testing.T) {
	t.Parallel() // it sleeps
	const idle = 500 * time.Millisecond
	w := newWorld(t, func(c *Config) { c.UDPIdle = idle })
	const dns = "10.96.0.1:53"
	s := w.add(t, service{proto: "udp", at: []string{dns}, to: w.all4()})
	client := w.pod(t)

	t.Run("kept while datagrams flow", func(t *testing.T) {
		socket := mustSocket(t, client, "udp4")
		last := time.Now()
		first, _ := ask(t, socket, dns)
		for range 8 {
			time.Sleep(idle / 4)
			asked := time.Now()
			name, _ := ask(t, socket, dns)
			if idled := time.Since(last) >= idle; name != first && !idled { // on a busy machine
				t.Fatalf("%s answered, want %s", name, first)
			}
			first, last = name, asked
		}
	})
	t.Run("given up when idle", func(t *testing.T) {
		var sockets []*lab.Socket
		before := make(map[*lab.Socket]string)
		for range 20 {
			socket := mustSocket(t, client, "udp4")
			sockets = append(sockets, socket)
			before[socket], _ = ask(t, socket, dns)
		}
		time.Sleep(idle * 3 / 2)
		moved := 0
		for _, socket := range sockets {
			if name, _ := ask(t, socket, dns); name != before[socket] {
				moved++
			}
		}
		if moved == 0 {
			t.Error("20 sockets all kept their backends")
		}
	})
	t.Run("kept to a backend that drains", func(t *testing.T) {
		defer w.publish(t, s, s.backends...)
		socket := mustSocket(t, client, "udp4")
		first, _ := ask(t, socket, dns)
		w.publish(t, s, s.without(w.named(t, s, first))...)
		for range 20 {
			if name, _ := ask(t, socket, dns); name != first {
				t.Fatalf("%s answered, want %s, which drains", name, first)
			}
		}
	})
	t.Run("moved from a backend that is gone", func(t *testing.T) {
		socket := mustSocket(t, client, "udp4")
		first, _ := ask(t, socket, dns)
		port, err := socket.Local()
		lab.Must(t, err)
		gone := w.named(t, s, first)
		w.publish(t, s, s.without(gone)...)
		w.forget(t, gone)
		mustFind(t, w, nil, 0, 0) // it is not connected
		second, from := ask(t, socket, dns)
		if second == first || from.String() != dns {
			t.Errorf("%s answered from %s, want not %s", second, from, first)
		}
		if now, err := socket.Local(); err != nil || now != port {
			t.Errorf("the socket is at %s, %v, want %s", now, err, port)
		}
	})
}

// A few destinations are stored with the socket, and more of them in the map of pins. All
// answers come from the original destination, and those of a backend that the socket sends
// to itself from the backend.
func TestManyDestinations(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	socket := mustSocket(t, client, "udp4")
	const own, all = 4, 7
	var at, backends []string
	for n := range all {
		at = append(at, fmt.Sprintf("10.96.1.%d:53", n+1))
		backends = append(backends, w.v4(n%len(w.answers)))
		w.add(t, service{proto: "udp", at: at[n:], to: backends[n:]})
	}
	for range 2 {
		for n, vip := range at {
			if _, from := ask(t, socket, vip); from.String() != vip {
				t.Errorf("what was sent to %s is answered from %s", vip, from)
			}
			if have, want := len(w.pinsOf(t, socket)), 2*max(n+1-own, 0); have < want {
				t.Errorf("%d pins with %d destinations, want %d", have, n+1, want)
			}
		}
	}
	for _, backend := range backends {
		if _, from := ask(t, socket, backend); from.String() != backend {
			t.Errorf("what was sent to %s itself is answered from %s", backend, from)
		}
	}
	for _, vip := range at {
		if _, from := ask(t, socket, vip); from.String() != vip {
			t.Errorf("once more: what was sent to %s is answered from %s", vip, from)
		}
	}
}

// pins returns the pins of the socket with this cookie.
func (w *world) pins(t testing.TB, cookie uint64) map[maps.UDPPinKey]maps.UDPPin {
	t.Helper()
	pins := make(map[maps.UDPPinKey]maps.UDPPin)
	for pin, err := range w.Maps().UDPPins.All() {
		lab.Must(t, err)
		if pin.Key.Cookie == cookie {
			pins[pin.Key] = pin.Value
		}
	}

	return pins
}

func (w *world) pinsOf(t testing.TB, s *lab.Socket) map[maps.UDPPinKey]maps.UDPPin {
	t.Helper()
	cookie, err := s.Cookie()
	lab.Must(t, err)

	return w.pins(t, cookie)
}

// named returns the backend of s whose pod has this name.
func (w *world) named(t testing.TB, s *service, name string) uint32 {
	t.Helper()
	at := slices.Index(colours, name)
	if at < 0 || at >= len(s.backends) {
		t.Fatalf("no backend is %q", name)
	}

	return s.backends[at]
}
