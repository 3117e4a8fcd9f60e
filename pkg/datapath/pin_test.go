package datapath

import (
	"testing"
	"time"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// How long an unconnected UDP socket keeps the backend of a Service.
func TestPins(t *testing.T) {
	t.Parallel() // it sleeps
	const idle = 500 * time.Millisecond
	w := newWorld(t, func(c *Config) { c.UDPIdle = idle })
	const dns = "10.96.0.1:53"
	s := w.add(t, service{proto: "udp", at: []string{dns}, to: w.all4()})
	client := w.pod(t)

	t.Run("kept while datagrams flow", func(t *testing.T) {
		socket := mustSocket(t, client, "udp4")
		first, _ := ask(t, socket, dns)
		for range 8 {
			time.Sleep(idle / 4)
			if name, _ := ask(t, socket, dns); name != first {
				t.Fatalf("%s answered, want %s", name, first)
			}
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
		w.publish(t, s, s.without(w.backendOf(t, socket))...)
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
		must(t, err)
		gone := w.backendOf(t, socket)
		w.publish(t, s, s.without(gone)...)
		w.forget(t, gone)
		if n, err := w.DestroyOrphans(); n != 0 || err != nil {
			t.Errorf("destroyed %d sockets, %v, want none: it is not connected", n, err)
		}
		second, from := ask(t, socket, dns)
		if second == first || from.String() != dns {
			t.Errorf("%s answered from %s, want not %s", second, from, first)
		}
		if now, err := socket.Local(); err != nil || now != port {
			t.Errorf("the socket is at %s, %v, want %s", now, err, port)
		}
	})
	t.Run("gone with the socket", func(t *testing.T) {
		socket := mustSocket(t, client, "udp4")
		ask(t, socket, dns)
		if n := len(w.pinsOf(t, socket)); n != 2 {
			t.Fatalf("%d pins, want one for each way", n)
		}
		cookie, err := socket.Cookie()
		must(t, err, socket.Close())
		if pins := w.pins(t, cookie); len(pins) != 0 {
			t.Errorf("%v after close", pins)
		}
	})
}

// pins returns the pins of the socket with this cookie, by their ways.
func (w *world) pins(t testing.TB, cookie uint64) map[uint16]maps.UDPPin {
	t.Helper()
	pins := make(map[uint16]maps.UDPPin)
	for pin, err := range w.Maps().UDPPins.All() {
		must(t, err)
		if pin.Key.Cookie == cookie {
			pins[pin.Key.Way] = pin.Value
		}
	}

	return pins
}

func (w *world) pinsOf(t testing.TB, s *lab.Socket) map[uint16]maps.UDPPin {
	t.Helper()
	cookie, err := s.Cookie()
	must(t, err)

	return w.pins(t, cookie)
}

// backendOf returns the backend to which a socket's datagrams are pinned.
func (w *world) backendOf(t testing.TB, s *lab.Socket) uint32 {
	t.Helper()
	pin, ok := w.pinsOf(t, s)[maps.UDPPinSend]
	if !ok {
		t.Fatal("the socket has no pin")
	}

	return pin.BackendId
}
