package datapath

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// A client keeps its backend for as long as it connects within the timeout.
func TestAffinity(t *testing.T) {
	t.Parallel() // it sleeps
	w := newWorld(t)
	const vip, lasting, external = "10.96.0.1:80", "10.96.0.2:80", "203.0.113.2:80"
	const timeout = 2 * time.Second
	s := w.add(t, service{proto: "tcp", at: []string{vip}, to: w.all4(), affinity: uint32(timeout.Seconds())})
	w.add(t, service{proto: "tcp", at: []string{lasting, external}, to: w.all4(), affinity: 1000})
	pod := w.pod(t)
	who := func(client *lab.Caller, at string) string {
		t.Helper()
		reply, err := client.Request("tcp4", at)
		lab.Must(t, err)

		return mustAnswer(t, reply.Text).Name
	}

	t.Run("kept by all processes of a namespace", func(t *testing.T) {
		first := who(pod, lasting)
		for range 10 {
			if got := who(w.pod(t), lasting); got != first {
				t.Fatalf("%s answered, want %s", got, first)
			}
		}
	})
	t.Run("kept at the other address of the service port", func(t *testing.T) {
		for range 5 {
			if one, two := who(pod, lasting), who(pod, external); one != two {
				t.Fatalf("%s and %s answered", one, two)
			}
		}
	})
	t.Run("independent of other namespaces", func(t *testing.T) {
		lab.Eventually(t, "another backend than the pod's", func() bool {
			lab.Must(t, w.Maps().Affinity.Delete(affinityKey(w.node.IPv4, s)))

			return who(w.host(t), vip) != who(pod, vip)
		})
	})
	t.Run("prolonged by every connection", func(t *testing.T) {
		first, since, before := who(pod, vip), time.Now(), time.Now()
		for range 60 {
			if time.Since(since) > timeout+time.Second {
				return
			}
			time.Sleep(timeout / 4)
			now := time.Now()
			got := who(pod, vip)
			if time.Since(before) >= timeout { // the machine is busy
				first, since = got, time.Now()
			} else if got != first {
				t.Fatalf("%s answered, want %s", got, first)
			}
			before = now
		}
		t.Fatalf("there are never %s in which the machine is not busy", timeout+time.Second)
	})
	t.Run("over after the timeout", func(t *testing.T) {
		first := who(pod, vip)
		for range 8 {
			time.Sleep(2050 * time.Millisecond)
			if who(pod, vip) != first {
				return
			}
		}
		t.Errorf("%s answered 9 times, each more than two seconds after the last", first)
	})
	t.Run("over when the backend leaves the slots", func(t *testing.T) {
		first := who(pod, vip)
		had, ok, err := w.Maps().Affinity.Lookup(affinityKey(w.client.IPv4, s))
		if !ok || err != nil {
			t.Fatalf("nothing remembered: %v", err)
		}
		w.publish(t, s, s.without(had.BackendId)...)
		moved := who(pod, vip)
		if moved == first {
			t.Fatalf("%s answered, which has no slot", moved)
		}
		w.publish(t, s, s.backends...)
		if got := who(pod, vip); got != moved {
			t.Errorf("%s answered, want %s: it was remembered since", got, moved)
		}
	})
}

// affinityKey is the key of the client with an address.
func affinityKey(client netip.Addr, s *service) maps.AffinityKey {
	return maps.AffinityKey{Client: client.As16(), ServicePortId: s.id, ClientKind: maps.ClientAddr}
}

// Affinity finds the slot of a remembered backend, and does not use one that has left the slots.
func TestAffinitySelection(t *testing.T) {
	w := newWorld(t)
	client := w.pod(t)
	for i, size := range extentSizes {
		at := fmt.Sprintf("10.96.0.%d:53", i+1)
		s := w.addLarge(t, size, service{at: []string{at}, affinity: 100})
		t.Run(fmt.Sprintf("the slot remembered of %d", size), func(t *testing.T) {
			for _, n := range []int{0, 1, 2, size / 3, size / 2, size - 2, size - 1} {
				if n < 0 || n >= size {
					continue
				}
				w.remember(t, s, s.backends[n])
				if got := w.connected(t, client, at); got != s.backends[n] {
					t.Errorf("slot %d: backend %d, want %d", n, got, s.backends[n])
				}
			}
		})
		if size == 1 {
			continue
		}
		t.Run(fmt.Sprintf("not what left the %d slots", size), func(t *testing.T) {
			left := s.backends[size/2]
			w.publish(t, s, s.without(left)...)
			for range 5 {
				w.remember(t, s, left)
				if got := w.connected(t, client, at); got == left {
					t.Errorf("backend %d, which has no slot", got)
				}
			}
		})
	}
}

// remember makes the client pod a client that has a backend of s.
func (w *world) remember(t testing.TB, s *service, backend uint32) {
	t.Helper()
	lab.Must(t, w.Maps().Affinity.Put(affinityKey(w.client.IPv4, s), maps.Affinity{BackendId: backend, LastUsed: monotonic(t)}))
}

// monotonic is the time as programs have it.
func monotonic(t testing.TB) uint64 {
	t.Helper()
	var now unix.Timespec
	lab.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))

	return uint64(now.Nano())
}

// connected returns the backend that a new UDP socket is given.
func (w *world) connected(t testing.TB, client *lab.Caller, at string) uint32 {
	t.Helper()
	socket := mustSocket(t, client, network("udp", at))
	defer socket.Close()
	lab.Must(t, socket.Connect(at))

	return w.stateOf(t, socket).BackendId
}

// stateOf returns the state that is stored with a socket.
func (w *world) stateOf(t testing.TB, s *lab.Socket) maps.SockState {
	t.Helper()
	cookie, err := s.Cookie()
	lab.Must(t, err)
	socks, err := w.TranslatedSocks()
	lab.Must(t, err)
	for _, sock := range socks {
		if sock.Cookie == cookie {
			return sock.State
		}
	}
	t.Fatal("the socket was not translated")

	return maps.SockState{}
}
