package e2e

import (
	"testing"

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

// mustBeAborted waits until the agent has destroyed a socket.
func mustBeAborted(t testing.TB, socket *lab.Socket) {
	t.Helper()
	lab.Eventually(t, "the socket of a backend that is gone is destroyed", func() bool {
		pending, err := socket.Option(unix.SOL_SOCKET, unix.SO_ERROR)
		lab.Must(t, err)

		return unix.Errno(pending) == unix.ECONNABORTED
	})
}

// A backend of a UDP Service goes. Sockets that are connected to it are
// destroyed, so that their owners connect anew; sockets that are not connected
// are sent to another backend; the sockets of other backends are not affected.
//
//	pod, node-1 ────── dns:80 ─┬─ pod-1-0  goes
//	                           └─ pod-2-0
func TestUDPBackendGoes(t *testing.T) {
	s := mustTestbed(t)
	goes, stays := s.Local()[0], s.Remote()[0]
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
		mustBeAborted(t, socket)
		lab.Must(t, socket.Connect(ip))
		if name := mustAsk(t, socket); name != stays.Name {
			t.Errorf("%s answers a socket that has connected anew, want %s", name, stays.Name)
		}
	}
	for _, socket := range connected[stays.Name] {
		if name := mustAsk(t, socket); name != stays.Name {
			t.Errorf("%s answers a socket that %s has answered", name, stays.Name)
		}
	}
}

// The whole UDP Service goes, and its sockets with it.
//
//	pod ────── dns:80 ── pod-1-0
func TestUDPServiceGoes(t *testing.T) {
	s := mustTestbed(t)
	s.SetEndpoints(t, "dns", scene.ReadyAll(s.Local()[0])...)
	ip := scene.At(s.CreateService(t, "dns").Spec.ClusterIPs[0], 80)
	scene.MustReach(t, s.Pod.To("udp", ip), s.Local()[0].Name)
	socket := mustConnect(t, s.Pod, ip)
	s.DeleteService(t, "dns")
	mustBeAborted(t, socket)
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
