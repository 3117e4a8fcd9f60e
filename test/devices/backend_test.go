package devices

import (
	"fmt"
	"testing"

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
