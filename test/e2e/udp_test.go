package e2e

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// mustConnect returns a UDP socket that is connected, and has been answered.
func mustConnect(t testing.TB, from *lab.Caller, address string) *lab.Socket {
	t.Helper()
	socket, err := from.Socket("udp4")
	if err != nil {
		t.Fatal(err)
	}
	must(t, socket.Connect(address))
	mustAsk(t, socket)

	return socket
}

// mustAsk returns the pod that answers a connected socket.
func mustAsk(t testing.TB, socket *lab.Socket) string {
	t.Helper()
	must(t, socket.Send("who\n"))
	text, _, err := socket.Recv()
	if err != nil {
		t.Fatal(err)
	}
	answer, err := lab.ParseAnswer(text)
	if err != nil {
		t.Fatal(err)
	}

	return answer.Name
}

// mustBeAborted waits until the agent has destroyed a socket.
func mustBeAborted(t testing.TB, socket *lab.Socket) {
	t.Helper()
	eventually(t, "the socket of a backend that is gone is destroyed", func() bool {
		pending, err := socket.Option(unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			t.Fatal(err)
		}

		return unix.Errno(pending) == unix.ECONNABORTED
	})
}

// A backend of a UDP Service goes. Sockets that are connected to it are
// destroyed, so that their owners connect anew; sockets that are not connected
// are led to another backend; the sockets of other backends are left alone.
//
//	pod-1-0, node-1 ── dns:80 ─┬─ pod-1-1  goes
//	                           └─ pod-2-0
func TestUDPBackendGoes(t *testing.T) {
	s := mustScene(t)
	goes, stays := s.local()[0], s.remote()[0]
	s.setEndpoints(t, "dns", readyAll(goes, stays)...)
	ip := at(s.createService(t, "dns").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "udp", ip}, goes.Name, stays.Name)
	connected := map[string][]*lab.Socket{}
	for len(connected[goes.Name]) < 4 || len(connected[stays.Name]) < 4 {
		for _, from := range []*lab.Caller{s.pod, s.node} {
			socket := mustConnect(t, from, ip)
			name := mustAsk(t, socket)
			connected[name] = append(connected[name], socket)
		}
	}
	loose := mustSendTo(t, s.pod, ip, goes.Name)

	s.setEndpoints(t, "dns", readyAll(stays)...)
	mustReach(t, dial{s.pod, "udp", ip}, stays.Name)
	eventually(t, "an unconnected socket is led to another backend", func() bool {
		return mustAskAt(t, loose, ip) == stays.Name
	})
	for _, socket := range connected[goes.Name] {
		mustBeAborted(t, socket)
		must(t, socket.Connect(ip))
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
//	pod-1-0 ── dns:80 ── pod-1-1
func TestUDPServiceGoes(t *testing.T) {
	s := mustScene(t)
	s.setEndpoints(t, "dns", readyAll(s.local()[0])...)
	ip := at(s.createService(t, "dns").Spec.ClusterIPs[0], 80)
	mustReach(t, dial{s.pod, "udp", ip}, s.local()[0].Name)
	socket := mustConnect(t, s.pod, ip)
	s.deleteService(t, "dns")
	mustBeAborted(t, socket)
	mustFail(t, dial{s.pod, "udp", ip}, unix.EHOSTUNREACH)
}

// mustSendTo returns a socket that is not connected, and that a certain pod
// answers.
func mustSendTo(t testing.TB, from *lab.Caller, address, want string) *lab.Socket {
	t.Helper()
	for {
		socket, err := from.Socket("udp4")
		if err != nil {
			t.Fatal(err)
		}
		if name := mustAskAt(t, socket, address); name == want {
			if again := mustAskAt(t, socket, address); again != want {
				t.Errorf("an unconnected socket was answered by %s, then by %s", name, again)
			}

			return socket
		}
		must(t, socket.Close())
	}
}

// mustAskAt returns the pod that answers an unconnected socket. The answer
// comes from the address that was asked.
func mustAskAt(t testing.TB, socket *lab.Socket, address string) string {
	t.Helper()
	must(t, socket.SendTo("who\n", address))
	text, from, err := socket.Recv()
	if err != nil {
		t.Fatal(err)
	}
	if from.String() != address {
		t.Errorf("the answer comes from %s, want %s", from, address)
	}
	answer, err := lab.ParseAnswer(text)
	if err != nil {
		t.Fatal(err)
	}

	return answer.Name
}
