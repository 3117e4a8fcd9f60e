package datapath

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/test/lab"
)

// nodePort is a UDP node port, and server where a server of the node answers.
const (
	nodePort = 30053
	server   = 5353
)

// newAnswerWorld has a node port that red answers, on all addresses of the node.
func newAnswerWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.needsNode(t)
	w.add(t, service{proto: "udp", at: []string{fmt.Sprintf("0.0.0.0:%d", nodePort)}, to: []string{w.v4(0)}})
	w.add(t, service{proto: "udp", at: []string{fmt.Sprintf("[::]:%d", nodePort)}, to: []string{w.v6(0)}})
	for _, a := range []netip.Addr{w.node.IPv4, w.node.IPv6, netip.MustParseAddr("10.244.1.1")} {
		w.mark(t, a, maps.AddrNode|maps.AddrNodePort)
	}

	return w
}

// An answer to a process of the node goes to the socket that has asked, although that has the port of a Service.
func TestAnswersOfServersOfTheNode(t *testing.T) {
	w := newAnswerWorld(t)
	v4, v6 := w.node.IPv4.String(), "["+w.node.IPv6.String()+"]"

	for _, test := range []struct {
		name, network          string
		serves, asks, asksFrom string // addresses
	}{
		{"IPv4", "udp4", v4, v4, v4},
		{"IPv6", "udp6", v6, v6, v6},
		{"IPv4, all addresses", "udp4", "0.0.0.0", v4, "0.0.0.0"},
		{"IPv6, all addresses", "udp6", "[::]", v6, "[::]"},
		{"another address of the node", "udp4", "10.244.1.1", "10.244.1.1", v4},
		{"loopback", "udp4", "127.0.0.1", "127.0.0.1", "127.0.0.1"},
		{"loopback, all addresses", "udp4", "0.0.0.0", "127.0.0.1", "0.0.0.0"},
		{"loopback of IPv6", "udp6", "[::]", "[::1]", "[::]"},
		{"IPv4 on a socket of IPv6", "udp6", "[::]", "[::ffff:" + v4 + "]", "[::]"},
	} {
		run := func(t *testing.T, connected bool) {
			host := w.host(t)
			answers, asker := mustSocket(t, host, test.network), mustSocket(t, host, test.network)
			lab.Must(t,
				answers.Bind(fmt.Sprintf("%s:%d", test.serves, server)),
				asker.Bind(fmt.Sprintf("%s:%d", test.asksFrom, nodePort)),
			)
			at := fmt.Sprintf("%s:%d", test.asks, server)
			send := asker.SendTo
			if connected {
				lab.Must(t, asker.Connect(at))
				send = func(text, _ string) error { return asker.Send(text) }
			}
			lab.Must(t, send("question", at))
			_, client, err := answers.Recv()
			lab.Must(t, err, answers.SendTo("answer", client.String()))
			if text, from, err := asker.Recv(); err != nil || text != "answer" || from.String() != at {
				t.Errorf("received %q from %s, %v", text, from, err)
			}
			// A server that has one socket for each client.
			lab.Must(t, answers.Connect(client.String()), answers.Send("again"))
			if text, from, err := asker.Recv(); err != nil || text != "again" || from.String() != at {
				t.Errorf("received %q from %s, %v", text, from, err)
			}
			lab.Must(t, answers.Close())

			// The port of the socket is still that of the Service.
			if name, _ := ask(t, mustSocket(t, host, test.network), client.String()); name != "red" {
				t.Errorf("another socket that dials %s reaches %s", client, name)
			}
			lab.Must(t, asker.Close())
		}
		t.Run(test.name, func(t *testing.T) { run(t, true) })
		t.Run(test.name+", without connect", func(t *testing.T) { run(t, false) })
	}
}

// A socket of any user that has the port of a Service takes nothing from it by being there, nor what another socket
// already exchanges with it.
func TestSocketsThatHaveNotAsked(t *testing.T) {
	w := newAnswerWorld(t)
	host := w.host(t)
	at := fmt.Sprintf("%s:%d", w.node.IPv4, nodePort)
	bound, client := mustSocket(t, host, "udp4"), mustSocket(t, host, "udp4")
	lab.Must(t, bound.Bind(at), client.Bind(fmt.Sprintf("%s:%d", w.node.IPv4, server)))
	asks := func(when string) {
		t.Helper()
		if name, _ := ask(t, client, at); name != "red" {
			t.Errorf("%s: reached %s, want red", when, name)
		}
	}

	asks("a socket is bound to the port")
	lab.Must(t, bound.SendTo("question", fmt.Sprintf("%s:%d", w.node.IPv4, server)))
	_, _, err := client.Recv()
	lab.Must(t, err)
	asks("it has sent to a socket that has dialled the Service before")
	lab.Must(t, bound.Connect(fmt.Sprintf("%s:%d", w.node.IPv4, server)))
	asks("it is connected to that")
}
