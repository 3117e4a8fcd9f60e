package devices

import (
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// TestBackendGoes takes a backend away under two clients. Over UDP the client
// moves on, as no error reports that the backend has gone; a TCP connection is
// its backend's to end.
//
//	client ── load balancer ─┬─ pod-2-0, goes
//	                         └─ pod-1-1, comes
func TestBackendGoes(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	w.mustBeStrict(t)
	c := casesOf(w)
	s := c.remote
	w.start(t, s)
	caller := w.outside(t)

	var datagrams, streams [2]*lab.Socket
	for _, f := range families {
		datagrams[f] = mustConnect(t, caller, []string{"udp4", "udp6"}[f], s.at(loadBalancer, f, nil))
		streams[f] = mustConnect(t, caller, []string{"tcp4", "tcp6"}[f], s.at(loadBalancer, f, nil))
		for _, socket := range []*lab.Socket{datagrams[f], streams[f]} {
			lab.Must(t, answeredBy(socket, "pod-2-0"))
		}
	}
	s.backends = c.local.backends
	w.publish(t, s)

	for _, f := range families {
		lab.Eventually(t, fmt.Sprintf("%s: UDP moves on", f), func() error { return answeredBy(datagrams[f], "pod-1-1") })
		lab.Must(t, answeredBy(streams[f], "pod-2-0"))
		lab.Must(t, answeredBy(mustConnect(t, caller, []string{"tcp4", "tcp6"}[f], s.at(loadBalancer, f, nil)), "pod-1-1"))
	}
	s.backends = nil
	w.publish(t, s)
	for _, f := range families {
		// Refused, or lost if the client has had its share of refusals.
		lab.Eventually(t, fmt.Sprintf("%s: UDP is answered by no backend", f), func() error {
			if err := answeredBy(datagrams[f], "pod-1-1"); err == nil {
				return fmt.Errorf("answered by pod-1-1")
			}
			return nil
		})
		lab.Must(t, answeredBy(streams[f], "pod-2-0"))
	}
}

// TestDirectConnectionBesideAService connects to a backend itself, from the very port that has a connection to
// its Service. Both work to their end: the backend sees the direct one come from another port. So it does
// behind kube-proxy, whose netfilter never has two connections of one tuple.
//
//	client ─┬─ load balancer ─┬─ pod-1-1
//	        └─────────────────┘
func TestDirectConnectionBesideAService(t *testing.T) {
	t.Parallel()
	w := mustWorld(t, setting{Config: lab.Config{OverlayMTU: 1450}, filter: bridgeCNI})
	c := casesOf(w)
	pod := c.local.backends[0]
	for _, f := range families {
		via, bits := w.Nodes[0].IPv4, 32
		if f == ipv6 {
			via, bits = w.Nodes[0].IPv6, 128
		}
		lab.Must(t, w.Client.AddRoute(netip.PrefixFrom(pod.ips[f], bits), via))
	}
	w.start(t, c.local)
	caller := w.outside(t)

	for _, f := range families {
		t.Run(f.String(), func(t *testing.T) {
			network := []string{"tcp4", "tcp6"}[f]
			source := netip.AddrPortFrom(hostIPs(w.Client)[f], 40_000)
			service := mustConnectFrom(t, caller, network, source, c.local.at(loadBalancer, f, nil))
			lab.Must(t, answeredBy(service, pod.name))
			for range 2 { // the second one finds what the first has left
				direct := mustConnectFrom(t, caller, network, source, netip.AddrPortFrom(pod.ips[f], podPort).String())
				for range 3 {
					lab.Must(t, answeredBy(direct, pod.name), answeredBy(service, pod.name))
				}
				lab.Must(t, direct.Close())
			}
			lab.Must(t, answeredBy(service, pod.name))
		})
	}
}

// mustConnectFrom is mustConnect from a port that other sockets have as well.
func mustConnectFrom(t *testing.T, from *lab.Caller, network string, source netip.AddrPort, address string) *lab.Socket {
	t.Helper()
	socket, err := from.Socket(network)
	lab.Must(t, err)
	lab.Must(t, socket.SetTimeout(dialTimeout),
		socket.SetOption(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), socket.Bind(source.String()), socket.Connect(address))

	return socket
}

// mustConnect returns a connected socket, which the caller closes with itself.
func mustConnect(t *testing.T, from *lab.Caller, network, address string) *lab.Socket {
	t.Helper()
	socket, err := from.Socket(network)
	lab.Must(t, err)
	lab.Must(t, socket.SetTimeout(dialTimeout), socket.Connect(address))

	return socket
}

// answeredBy asks on a connected socket.
func answeredBy(socket *lab.Socket, backend string) error {
	if err := socket.Send("who\n"); err != nil {
		return err
	}
	text, _, err := socket.Recv()
	if err != nil {
		return err
	}
	answer, err := lab.ParseAnswer(text)
	if err == nil && answer.Name != backend {
		err = fmt.Errorf("answered by %s, want %s", answer.Name, backend)
	}

	return err
}
