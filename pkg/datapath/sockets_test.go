package datapath

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// The list has a socket at the backend that it is connected to, and at no other: one that connected to another
// Service in vain keeps its peer, but its state is that of the other.
func TestSockets(t *testing.T) {
	w := newWorld(t)
	const web, vain = "10.96.0.1:80", "10.96.0.2:80"
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{web}, to: []string{w.v4(0)}})
	}
	w.add(t, service{proto: "udp", at: []string{vain}, to: []string{"255.255.255.255:8080"}})
	client := w.pod(t)
	tcp, udp, failed, closed := mustSocket(t, client, "tcp4"), mustSocket(t, client, "udp4"), mustSocket(t, client, "udp4"), mustSocket(t, client, "tcp4")
	lab.Must(t, tcp.Connect(web), udp.Connect(web), failed.Connect(web), closed.Connect(web), closed.Close())
	if err := failed.Connect(vain); lab.Errno(err) != unix.EACCES {
		t.Fatalf("connect to the broadcast address: %v, want %v", err, unix.EACCES)
	}

	sockets, err := OpenSockets()
	lab.Must(t, err)
	defer sockets.Close()
	all, err := sockets.All(w.Maps())
	lab.Must(t, err)
	byCookie := make(map[uint64]maps.TranslatedSock)
	for _, sock := range all {
		byCookie[sock.Cookie] = sock
	}
	for name, test := range map[string]struct {
		socket *lab.Socket
		listed bool
	}{"of TCP": {tcp, true}, "of UDP": {udp, true}, "connected in vain": {failed, false}} {
		cookie, err := test.socket.Cookie()
		lab.Must(t, err)
		if _, listed := byCookie[cookie]; listed != test.listed {
			t.Errorf("a socket %s: listed is %v", name, listed)
		}
	}
	var own uint64
	lab.MustDo(t, w.client.Namespace, func() error {
		var stat unix.Stat_t
		err := unix.Stat("/proc/thread-self/ns/net", &stat)
		own = stat.Ino

		return err
	})
	cookie, _ := tcp.Cookie()
	if sock := byCookie[cookie]; uint64(sock.Netns) != own || sock.Inode == 0 || sock.Cgroup == 0 || sock.Family != unix.AF_INET {
		t.Errorf("of TCP: %+v", sock)
	}
}
