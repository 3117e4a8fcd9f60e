package datapath

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// Sockets whose backend is removed are found, and destroyed if there is another backend, to which no program can
// lead them: here, the backend was behind the same bridge, and does not answer any more. Sockets next to them, in the
// client pod and on the node, are left alone.
func TestOrphans(t *testing.T) {
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

	mustFind(t, w, nil, 0, 0) // all backends live
	w.forget(t, slices.Concat(dying4.backends, dying6.backends, nowhere.backends)...)
	w.publish(t, dying4)
	left := []string{w.v4(0), w.v6(0)}
	mustFind(t, w, left, 0, len(orphans)) // there is no other backend
	w.add(t, service{id: dying4.id, proto: "udp", at: dying4.at, to: []string{w.v4(1)}})
	w.add(t, service{id: dying6.id, proto: "udp", at: dying6.at, to: []string{w.v6(1)}})
	inPod := len(orphans) - 3
	mustFind(t, w, left, inPod, len(orphans)-inPod) // packets of the node pass its bridge, as long as that knows the neighbour
	flushNeighbours(t, w)
	mustEnd(t, w, mustFind(t, w, left, len(orphans), 0))
	mustFind(t, w, nil, 0, 0) // they are gone

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

// mustFind looks for orphans as the agent of the node does. It returns those that are stuck.
func mustFind(t testing.TB, w *world, left []string, stuck, passing int) []maps.TranslatedSock {
	t.Helper()
	var found Orphans
	lab.MustDo(t, w.node.Namespace, func() (err error) {
		found, err = w.FindOrphans()

		return err
	})
	want := make(map[maps.Addr]struct{})
	for _, a := range left {
		want[maps.AddrOf(netip.MustParseAddrPort(a).Addr())] = struct{}{}
	}
	if diff := cmp.Diff(want, found.Left); diff != "" {
		t.Fatalf("addresses that were left (-want +got):\n%s", diff)
	}
	if len(found.Stuck) != stuck || found.Passing != passing {
		t.Fatalf("%d sockets are stuck, and %d are not, want %d and %d", len(found.Stuck), found.Passing, stuck, passing)
	}

	return found.Stuck
}

func mustEnd(t testing.TB, w *world, socks []maps.TranslatedSock) {
	t.Helper()
	if n, err := DestroySocks(socks); n != len(socks) || err != nil {
		t.Fatalf("destroyed %d sockets, %v, want %d", n, err, len(socks))
	}
}

// flushNeighbours makes the node forget the neighbours behind its bridge, as it does when they do not answer.
func flushNeighbours(t testing.TB, w *world) {
	t.Helper()
	handle, bridge := w.node.Netlink(), deviceIndex(t, w.node.Namespace, "br0")
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		neighbours, err := handle.NeighList(bridge, family)
		lab.Must(t, err)
		for _, n := range neighbours {
			if n.State&(netlink.NUD_NOARP|netlink.NUD_PERMANENT) == 0 {
				lab.Must(t, handle.NeighDel(&n))
			}
		}
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
	mustEnd(t, w, mustFind(t, w, []string{w.v4(0)}, 1, 0))

	_, _, err := socket.Recv()
	if lab.Errno(err) != unix.ECONNABORTED {
		t.Fatalf("receive: %v, want %v", err, unix.ECONNABORTED)
	}
	lab.Must(t, socket.Connect(vip))
	if name, from := ask(t, socket, ""); name != "green" || from != netip.MustParseAddrPort(vip) {
		t.Errorf("%s answered from %s, want green from %s", name, from, vip)
	}
	mustFind(t, w, nil, 0, 0)
}

// A socket is an orphan although its backend exists, if the original destination does not belong to the Service any
// more, and none if its backend has come back with another id.
func TestOrphanOfAnAddress(t *testing.T) {
	const vip, kept = "10.96.0.1:53", "10.96.0.2:53"
	for _, test := range []struct {
		name string
		do   func(*testing.T, *world, *service)
		want int
	}{
		{"left alone while nothing changes", func(*testing.T, *world, *service) {}, 0},
		{"found when the address is no frontend any more", func(t *testing.T, w *world, s *service) {
			lab.Must(t, w.maps.FrontendIDs.Delete(s.key(vip)))
		}, 1},
		{"found when the address belongs to another Service", func(t *testing.T, w *world, _ *service) {
			w.add(t, service{proto: "udp", at: []string{vip}, to: []string{w.v4(1)}})
		}, 1},
		{"found when the id is another backend's", func(t *testing.T, w *world, s *service) {
			id := s.backends[0]
			b := w.maps.Backends.Get(id)
			b.Addr = maps.AddrOf(netip.MustParseAddrPort(w.v4(1)).Addr())
			lab.Must(t, w.maps.Backends.Put(id, b))
		}, 2},
		{"left alone when the backend has come back", func(t *testing.T, w *world, s *service) {
			w.forget(t, s.backends...)
			w.add(t, service{id: s.id, proto: "udp", at: s.at, to: s.to})
		}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			s := w.add(t, service{proto: "udp", at: []string{vip, kept}, to: []string{w.v4(0)}})
			client := w.pod(t)
			lab.Must(t, mustSocket(t, client, "udp4").Connect(vip), mustSocket(t, client, "udp4").Connect(kept))
			test.do(t, w, s)
			socks, err := w.TranslatedSocks()
			lab.Must(t, err)
			if found, err := w.orphans(socks); len(found) != test.want || err != nil {
				t.Errorf("%d orphans, %v, want %d", len(found), err, test.want)
			}
		})
	}
}

// A socket whose network namespace this process cannot enter is an error, and no reason to leave others alone.
func TestDestroySocksOfNowhere(t *testing.T) {
	if n, err := DestroySocks([]maps.TranslatedSock{{Netns: 1}}); n != 0 || !errors.Is(err, ErrNetnsNotFound) {
		t.Errorf("%d were destroyed: %v", n, err)
	}
}
