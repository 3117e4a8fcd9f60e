package datapath

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Sockets whose backend is removed are destroyed, and sockets next to them, in the client
// pod and on the node, are not.
func TestDestroyOrphans(t *testing.T) {
	w := newWorld(t)
	const vip4, vip6, mapped, other4 = "10.96.0.1:53", "[fd00:96::1]:53", "[::ffff:10.96.0.1]:53", "10.96.0.2:53"
	dying4 := w.add(t, service{proto: "udp", at: []string{vip4}, to: []string{w.v4(0)}})
	dying6 := w.add(t, service{proto: "udp", at: []string{vip6}, to: []string{w.v6(0)}})
	w.add(t, service{proto: "udp", at: []string{other4}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{vip4}, to: []string{w.v4(0)}})
	nowhere := w.add(t, service{proto: "udp", at: []string{"10.96.0.3:53"}, to: []string{"255.255.255.255:8080"}})

	clients := map[string]*lab.Caller{"pod": w.pod(t), "node": w.host(t)}
	orphans, others := make(map[string]*lab.Socket), make(map[string]*lab.Socket)
	for where, client := range clients {
		dial := func(network, to string) *lab.Socket {
			s := mustSocket(t, client, network)
			lab.Must(t, s.Connect(to), s.Send("who\n"))
			_, _, err := s.Recv()
			lab.Must(t, err)

			return s
		}
		orphans["an IPv4 socket of the "+where] = dial("udp4", vip4)
		orphans["an IPv6 socket of the "+where] = dial("udp6", vip6)
		orphans["a v4-mapped socket of the "+where] = dial("udp6", mapped)
		others["connected to the backend itself, "+where] = dial("udp4", w.v4(0))
		others["connected by way of another Service, "+where] = dial("udp4", other4)
		others["of TCP, "+where] = dial("tcp4", vip4)
		unconnected := mustSocket(t, client, "udp4")
		ask(t, unconnected, vip4)
		others["unconnected, "+where] = unconnected
		switched := dial("udp4", vip4)
		lab.Must(t, switched.Connect(w.v4(0)))
		others["connected to the backend itself after the Service, "+where] = switched
		failed := dial("udp4", other4)
		if err := failed.Connect(nowhere.at[0]); lab.Errno(err) != unix.EACCES {
			t.Fatalf("connect to the broadcast address: %v, want %v", err, unix.EACCES)
		}
		others["where it was after a connect in vain, "+where] = failed
	}
	bound := mustSocket(t, clients["pod"], "udp4")
	lab.Must(t, bound.SetOption(unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, deviceIndex(t, w.client.Namespace, "eth0")), bound.Connect(vip4))
	orphans["a socket bound to a device"] = bound

	mustDestroy(t, w, 0) // all backends live
	w.forget(t, slices.Concat(dying4.backends, dying6.backends, nowhere.backends)...)
	w.publish(t, dying4)
	mustDestroy(t, w, len(orphans))
	mustDestroy(t, w, 0) // they are gone

	for name, s := range orphans {
		t.Run("destroyed: "+name, func(t *testing.T) {
			if _, _, err := s.Recv(); lab.Errno(err) != unix.ECONNABORTED {
				t.Errorf("receive: %v, want %v", err, unix.ECONNABORTED)
			}
			if _, err := s.Peer(); lab.Errno(err) != unix.ENOTCONN {
				t.Errorf("getpeername: %v, want %v", err, unix.ENOTCONN)
			}
		})
	}
	for name, s := range others {
		t.Run("left alone: "+name, func(t *testing.T) {
			to := ""
			if name[:11] == "unconnected" {
				to = w.v4(1) // its Service has no backend any more
			}
			ask(t, s, to)
		})
	}
}

func mustDestroy(t testing.TB, w *world, want int) {
	t.Helper()
	if n, err := w.DestroyOrphans(); n != want || err != nil {
		t.Fatalf("destroyed %d sockets, %v, want %d", n, err, want)
	}
}

func deviceIndex(t testing.TB, ns *lab.Namespace, name string) int {
	t.Helper()
	device, err := ns.Netlink().LinkByName(name)
	lab.Must(t, err)

	return device.Attrs().Index
}

// A destroyed socket can be connected again.
func TestOrphanConnectsAnew(t *testing.T) {
	w := newWorld(t)
	const vip = "10.96.0.1:53"
	s := w.add(t, service{proto: "udp", at: []string{vip}, to: []string{w.v4(0), w.v4(1)}})
	w.publish(t, s, s.backends[0])
	socket := mustSocket(t, w.pod(t), "udp4")
	lab.Must(t, socket.Connect(vip))
	w.publish(t, s, s.backends[1])
	w.forget(t, s.backends[0])
	mustDestroy(t, w, 1)

	_, _, err := socket.Recv()
	if lab.Errno(err) != unix.ECONNABORTED {
		t.Fatalf("receive: %v, want %v", err, unix.ECONNABORTED)
	}
	lab.Must(t, socket.Connect(vip))
	if name, from := ask(t, socket, ""); name != "green" || from != netip.MustParseAddrPort(vip) {
		t.Errorf("%s answered from %s, want green from %s", name, from, vip)
	}
	mustDestroy(t, w, 0)
}

// A socket is destroyed although its backend exists, if the original destination does not
// belong to the Service any more.
func TestOrphanOfAnAddress(t *testing.T) {
	const vip, kept = "10.96.0.1:53", "10.96.0.2:53"
	for _, test := range []struct {
		name string
		do   func(*testing.T, *world, *service)
		want int
	}{
		{"left alone while nothing changes", func(*testing.T, *world, *service) {}, 0},
		{"destroyed when the address is no frontend any more", func(t *testing.T, w *world, s *service) {
			lab.Must(t, w.maps.FrontendIDs.Delete(s.key(vip)))
		}, 1},
		{"destroyed when the address belongs to another Service", func(t *testing.T, w *world, _ *service) {
			w.add(t, service{proto: "udp", at: []string{vip}, to: []string{w.v4(1)}})
		}, 1},
		{"destroyed when the id is another backend's", func(t *testing.T, w *world, s *service) {
			id := s.backends[0]
			b := w.maps.Backends.Get(id)
			b.Addr = maps.AddrOf(netip.MustParseAddrPort(w.v4(1)).Addr())
			lab.Must(t, w.maps.Backends.Put(id, b))
		}, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.add(t, service{proto: "udp", at: []string{vip, kept}, to: []string{w.v4(0)}})
			client := w.pod(t)
			lab.Must(t, mustSocket(t, client, "udp4").Connect(vip), mustSocket(t, client, "udp4").Connect(kept))
			test.do(t, w, s)
			mustDestroy(t, w, test.want)
		})
	}
}

// A socket whose network namespace this process cannot enter is an error, and no reason to leave others alone.
func TestDestroySocksOfNowhere(t *testing.T) {
	if n, err := DestroySocks([]maps.TranslatedSock{{Netns: 1}}); n != 0 || !errors.Is(err, ErrNetnsNotFound) {
		t.Errorf("%d were destroyed: %v", n, err)
	}
}
