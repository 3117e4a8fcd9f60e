package datapath

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Node ports answer on the node's addresses for all clients, and on loopback for the
// node itself. A pod's loopback is its own.
func TestNodePorts(t *testing.T) {
	w := newWorld(t)
	w.needsNode(t)
	w.add(t, service{proto: "tcp", at: []string{"0.0.0.0:30080"}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{"[::]:30080"}, to: []string{w.v6(0)}})
	w.add(t, service{proto: "udp", at: []string{"0.0.0.0:30080"}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "tcp", at: []string{"192.168.50.1:30080"}, to: []string{w.v4(1)}})
	w.nodePortsAt(t, w.node.IPv4, w.node.IPv6, netip.MustParseAddr("10.244.1.1"))
	lab.MustServe(t, w.client.Namespace, "own", "127.0.0.1:30080", "127.0.1.1:30080", "[::1]:30080")
	pod, host := w.pod(t), w.host(t)

	for _, test := range []struct {
		name, network, dial, want string
		client                    *lab.Caller
	}{
		{"a bridge address of the node", "tcp4", "10.244.1.1:30080", "red", host},
		{"a bridge address of the node from a pod", "tcp4", "10.244.1.1:30080", "red", pod},
		{"an IPv6 address of the node", "tcp6", "[fd00:50::1]:30080", "red", host},
		{"an IPv6 address of the node from a pod", "tcp6", "[fd00:50::1]:30080", "red", pod},
		{"a v4-mapped address of the node", "tcp6", "[::ffff:10.244.1.1]:30080", "red", pod},
		{"UDP", "udp4", "192.168.50.1:30080", "red", pod},
		{"UDP on loopback", "udp4", "127.0.0.1:30080", "red", host},
		{"the frontend of that very address", "tcp4", "192.168.50.1:30080", "green", host},
		{"the frontend of that very address from a pod", "tcp4", "192.168.50.1:30080", "green", pod},
		{"loopback", "tcp4", "127.0.0.1:30080", "red", host},
		{"loopback at another address", "tcp4", "127.0.1.1:30080", "red", host},
		{"UDP on loopback at another address", "udp4", "127.0.0.2:30080", "red", host},
		{"loopback over IPv6", "tcp6", "[::1]:30080", "red", host},
		{"v4-mapped loopback", "tcp6", "[::ffff:127.0.0.1]:30080", "red", host},
		{"the pod's own loopback", "tcp4", "127.0.0.1:30080", "own", pod},
		{"the pod's own loopback at another address", "tcp4", "127.0.1.1:30080", "own", pod},
		{"the pod's own loopback over IPv6", "tcp6", "[::1]:30080", "own", pod},
		{"the pod's own loopback over UDP", "udp4", "127.0.0.1:30080", "own", pod},
		{"the pod's own loopback, named 0.0.0.0", "tcp4", "0.0.0.0:30080", "own", pod},
		{"the pod's own loopback, named ::", "tcp6", "[::]:30080", "own", pod},
	} {
		t.Run(test.name, func(t *testing.T) {
			reply, err := test.client.Request(test.network, test.dial)
			lab.Must(t, err)
			if got := mustAnswer(t, reply.Text).Name; got != test.want {
				t.Errorf("%s answered, want %s", got, test.want)
			}
		})
	}
	t.Run("loopback, named 0.0.0.0", func(t *testing.T) {
		for unspecified, want := range map[string]string{
			"0.0.0.0:30080": "127.0.0.1:30080", "[::]:30080": "[::1]:30080", "[::ffff:0.0.0.0]:30080": "[::ffff:127.0.0.1]:30080",
		} {
			s := mustSocket(t, host, map[int]string{unix.AF_INET: "tcp4", unix.AF_INET6: "tcp6"}[family(unspecified)])
			lab.Must(t, s.Connect(unspecified))
			if peer, err := s.Peer(); err != nil || peer.String() != want {
				t.Errorf("getpeername of %s: %s, %v, want %s", unspecified, peer, err, want)
			}
		}
	})
	t.Run("not an address that was not chosen", func(t *testing.T) {
		for _, a := range []string{"10.244.1.3:30080"} {
			if _, err := host.Request("tcp4", a); lab.Errno(err) != unix.ECONNREFUSED {
				t.Errorf("%s: %v, want %v", a, err, unix.ECONNREFUSED)
			}
		}
	})
}
