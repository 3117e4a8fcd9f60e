package datapath

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Slots, affinity and pins may hold an id that belongs to another Service by now.
func TestStaleIDs(t *testing.T) {
	w := newWorld(t)
	other := w.add(t, service{proto: "udp", at: []string{"10.96.0.9:53"}, to: []string{w.v4(2)}})
	foreign := other.backends[0]
	client := w.pod(t)

	t.Run("refused in slots", func(t *testing.T) {
		s := w.add(t, service{proto: "udp", at: []string{"10.96.0.1:53"}})
		w.publish(t, s, foreign)
		counted := w.counted(t, func() {
			if err := mustSocket(t, client, "udp4").SendTo("who", s.at[0]); w.Features().SetRetval && lab.Errno(err) != unix.EHOSTUNREACH {
				t.Errorf("sendto: %v, want %v", err, unix.EHOSTUNREACH)
			}
		})
		if counted[maps.ReasonDropBackendMissing] != 1 {
			t.Errorf("counted %v", counted)
		}
	})
	t.Run("passed over in affinity", func(t *testing.T) {
		s := w.add(t, service{proto: "udp", at: []string{"10.96.0.2:53"}, to: []string{w.v4(0)}, affinity: 100})
		w.publish(t, s, s.backends[0], foreign)
		for range 10 {
			w.remember(t, s, foreign)
			if got := w.connected(t, client, s.at[0]); got != s.backends[0] {
				t.Errorf("backend %d, want %d", got, s.backends[0])
			}
		}
	})
	t.Run("re-pinned", func(t *testing.T) {
		s := w.add(t, service{proto: "udp", at: []string{"10.96.0.3:53"}, to: []string{w.v4(0)}})
		socket := mustSocket(t, client, "udp4")
		ask(t, socket, s.at[0])
		id := s.backends[0]
		lab.Must(t, w.Maps().Backends.Put(id, maps.BackendOf(id, other.id, netip.AddrPortFrom(w.answers[2].IPv4, serverPort), 0)))
		w.add(t, service{id: s.id, proto: "udp", at: s.at, to: []string{w.v4(1)}})
		if name, _ := ask(t, socket, s.at[0]); name != "green" {
			t.Errorf("%s answered, want green", name)
		}
	})
}
