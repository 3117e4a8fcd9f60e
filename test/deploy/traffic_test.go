package deploy

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/object"
)

// mustReach waits until all of these pods answer, and no others.
func mustReach(t testing.TB, from *lab.Caller, network, address string, want ...*lab.Pod) {
	t.Helper()
	var names []string
	for _, pod := range want {
		names = append(names, pod.Name)
	}
	lab.EventuallyIn(t, waitTimeout, fmt.Sprintf("%s %s leads to %v", network, address, names), func() error {
		answered := make(map[string]bool)
		for range 40 * len(names) {
			reply, err := from.Exchange(lab.Exchange{Network: network, Address: address, Timeout: time.Second})
			if err != nil {
				return err
			}
			answer, err := lab.ParseAnswer(reply.Text)
			if err != nil {
				return err
			}
			if !slices.Contains(names, answer.Name) {
				return fmt.Errorf("%s answers", answer.Name)
			}
			answered[answer.Name] = true
		}
		if len(answered) < len(names) {
			return fmt.Errorf("only %v answer", answered)
		}

		return nil
	})
}

// mustConnect returns a UDP socket that is connected to the Service, and has
// been answered.
func mustConnect(t testing.TB, from *lab.Caller, address string) *lab.Socket {
	t.Helper()
	socket, err := from.Socket("udp4")
	lab.Must(t, err)
	lab.Must(t, socket.Connect(address), socket.Send("who\n"))
	_, _, err = socket.Recv()
	lab.Must(t, err)

	return socket
}

// aborted returns no error if the agent has ended a socket.
func aborted(socket *lab.Socket) error {
	pending, err := socket.Option(unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && unix.Errno(pending) != unix.ECONNABORTED {
		err = errors.New("the socket stays with its backend")
	}

	return err
}

// ledTo returns no error if the next datagram of a connected socket is answered by a pod.
func ledTo(socket *lab.Socket, pod *lab.Pod) error {
	if err := socket.Send("who\n"); err != nil {
		return err
	}
	text, _, err := socket.Recv()
	if err != nil {
		return err
	}
	answer, err := lab.ParseAnswer(text)
	if err == nil && answer.Name != pod.Name {
		err = fmt.Errorf("%s answers", answer.Name)
	}

	return err
}

// mustMoveService replaces the endpoints of a Service.
func (a *apiServer) mustMoveService(t testing.TB, name string, backends ...*lab.Pod) {
	t.Helper()
	slices := a.client.DiscoveryV1().EndpointSlices("default")
	slice, err := slices.Get(t.Context(), name, metav1.GetOptions{})
	lab.Must(t, err)
	slice.Endpoints = []discoveryv1.Endpoint{}
	for _, pod := range backends {
		slice.Endpoints = append(slice.Endpoints, object.Endpoint(pod.IPv4, a.nodeName()))
	}
	_, err = slices.Update(t.Context(), slice, metav1.UpdateOptions{})
	lab.Must(t, err)
}
