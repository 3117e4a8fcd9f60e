package e2e

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// mustConnect returns a UDP socket that is connected, and has been answered.
func mustConnect(t testing.TB, from *scene.Client, address string) *lab.Socket {
	t.Helper()
	socket, err := from.Socket("udp4")
	lab.Must(t, err)
	lab.Must(t, socket.Connect(address))
	mustAsk(t, socket)

	return socket
}

// mustAsk returns the pod that answers a connected socket.
func mustAsk(t testing.TB, socket *lab.Socket) string {
	t.Helper()
	lab.Must(t, socket.Send("who\n"))
	text, _, err := socket.Recv()
	lab.Must(t, err)
	answer, err := lab.ParseAnswer(text)
	lab.Must(t, err)

	return answer.Name
}

// mustMoveTo waits until a pod answers a connected socket, which sees nothing but that.
func mustMoveTo(t testing.TB, socket *lab.Socket, pod *lab.Pod) {
	t.Helper()
	lab.Eventually(t, "a connected socket is led to another backend", func() bool { return mustAsk(t, socket) == pod.Name })
}

// mustBeUnanswered waits until no backend gets the datagrams of a connected socket, although it would answer.
func mustBeUnanswered(t testing.TB, socket *lab.Socket) {
	t.Helper()
	lab.Must(t, socket.SetTimeout(300*time.Millisecond))
	lab.Eventually(t, "a connected socket of a Service that is gone gets no answer", func() bool {
		err := socket.Send("who\n")
		if err == nil {
			_, _, err = socket.Recv()
		}

		return errors.Is(err, unix.ETIMEDOUT) || errors.Is(err, unix.ECONNREFUSED)
	})
}

// A backend of a UDP Service goes. Sockets are led to another backend, whether they are connected or not; those of
// other backends are not affected.
//
//	pod, node-1 ────── dns:80 ─┬─ pod-2-0  goes
//	                           └─ pod-1-0
func TestUDPBackendGoes(t *testing.T) {
	s := mustTestbed(t)
	goes, stays := s.Remote()[0], s.Local()[0]
	s.SetEndpoints(t, "dns", scene.ReadyAll(goes, stays)...)
	ip := scene.At(s.CreateService(t, "dns").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("udp", ip), goes.Name, stays.Name)
	connected := map[string][]*lab.Socket{}
	for len(connected[goes.Name]) < 4 || len(connected[stays.Name]) < 4 {
		for _, from := range []*scene.Client{s.Pod, s.Node} {
			socket := mustConnect(t, from, ip)
			name := mustAsk(t, socket)
			connected[name] = append(connected[name], socket)
		}
	}
	loose := mustSendTo(t, s.Pod, ip, goes.Name)

	s.SetEndpoints(t, "dns", scene.ReadyAll(stays)...)
	scene.MustReach(t, s.Pod.To("udp", ip), stays.Name)
	lab.Eventually(t, "an unconnected socket is led to another backend", func() bool {
		return mustAskAt(t, loose, ip) == stays.Name
	})
	for _, socket := range connected[goes.Name] {
		mustMoveTo(t, socket, stays)
		if peer, err := socket.Peer(); err != nil || peer.String() != ip {
			t.Errorf("the peer is %s, %v, want %s", peer, err, ip)
		}
	}
	for _, socket := range connected[stays.Name] {
		if name := mustAsk(t, socket); name != stays.Name {
			t.Errorf("%s answers a socket that %s has answered", name, stays.Name)
		}
	}
}

// The whole UDP Service goes, and its sockets get no answer any more, though the backend stays.
//
//	pod ────── dns:80 ── pod-1-0
func TestUDPServiceGoes(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "dns", scene.ReadyAll(s.Local()[0])...)
	ip := scene.At(s.CreateService(t, "dns").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("udp", ip), s.Local()[0].Name)
	socket := mustConnect(t, s.Pod, ip)
	s.DeleteService(t, "dns")
	mustBeUnanswered(t, socket)
	scene.MustFail(t, s.Pod.To("udp", ip), scene.Dropped)
}

// mustSendTo returns a socket that is not connected, and that a certain pod
// answers.
func mustSendTo(t testing.TB, from *scene.Client, address, want string) *lab.Socket {
	t.Helper()
	for {
		socket, err := from.Socket("udp4")
		lab.Must(t, err)
		if name := mustAskAt(t, socket, address); name == want {
			if again := mustAskAt(t, socket, address); again != want {
				t.Errorf("an unconnected socket was answered by %s, then by %s", name, again)
			}

			return socket
		}
		lab.Must(t, socket.Close())
	}
}

// mustAskAt returns the pod that answers an unconnected socket. The answer
// comes from the address that was asked.
func mustAskAt(t testing.TB, socket *lab.Socket, address string) string {
	t.Helper()
	lab.Must(t, socket.SendTo("who\n", address))
	text, from, err := socket.Recv()
	lab.Must(t, err)
	if from.String() != address {
		t.Errorf("the answer comes from %s, want %s", from, address)
	}
	answer, err := lab.ParseAnswer(text)
	lab.Must(t, err)

	return answer.Name
}
