package datapath

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Sockets are translated, too, if they connect or are held in ways that few programs use.
func TestUncommonSockets(t *testing.T) {
	w := newWorld(t)
	const vip = "10.96.0.1:80"
	for _, proto := range []string{"tcp", "udp"} {
		w.add(t, service{proto: proto, at: []string{vip}, to: []string{w.v4(0)}})
	}
	w.add(t, service{proto: "tcp", at: []string{"10.96.0.2:80"}, to: []string{"127.0.0.1:8081"}}) // refuses
	w.add(t, service{proto: "udp", at: []string{"10.96.0.2:80"}, to: []string{"127.0.0.1:8081"}})

	for _, test := range []struct{ name, scene, want string }{
		{"translated by sendto with MSG_FASTOPEN", "fast open", "red, peer 10.96.0.1:80"},
		// The hook sees the first subflow; the application's socket is another.
		{"translated with multipath TCP, but for getpeername", "multipath", "red, peer " + w.v4(0)},
		{"translated when connect does not block", "non-blocking connect", "EINPROGRESS, EALREADY or done, red, peer 10.96.0.1:80"},
		{"known by duplicates and children", "inherit", "red, peer 10.96.0.1:80; red, peer 10.96.0.1:80; red, peer 10.96.0.1:80"},
		// The kernel runs no hook when a socket reads its queue of errors.
		{"translated, but not in the queue of errors", "error queue", "about 127.0.0.1:8081"},
		{"no memory of a listener that its connections inherit", "listen after connect", "peer 127.0.0.1:8081"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got := w.play(t, w.client.Namespace, test.scene, vip, "10.96.0.2:80")
			if strings.HasPrefix(got, "skip: ") {
				t.Skip(got)
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// answerOn asks on a connected socket, and returns the name of the backend and the peer
// address that the socket has.
func answerOn(fd int) (string, error) {
	if _, err := unix.Write(fd, []byte("who\n")); err != nil {
		return "", err
	}

	return readAnswer(fd)
}

func readAnswer(fd int) (string, error) {
	b := make([]byte, 200)
	n, err := unix.Read(fd, b)
	if err != nil {
		return "", err
	}
	answer, err := lab.ParseAnswer(strings.TrimSpace(string(b[:n])))
	if err != nil {
		return "", err
	}
	peer, err := unix.Getpeername(fd)
	if err != nil {
		return "", err
	}

	return fmt.Sprintf("%s, peer %s", answer.Name, addrPort(peer)), nil
}

func sceneFastOpen(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return "", err
	}
	if err := unix.Sendto(fd, []byte("who\n"), unix.MSG_FASTOPEN, sockaddr(args[0])); err != nil {
		return "", err
	}

	return readAnswer(fd)
}

func sceneMultipath(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)
	if err != nil {
		return "skip: this kernel has no multipath TCP: ", err
	}
	if err := unix.Connect(fd, sockaddr(args[0])); err != nil {
		return "", err
	}

	return answerOn(fd)
}

// sceneErrorQueue sends a datagram that is refused, and reads the error from the socket's queue.
func sceneErrorQueue(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return "", err
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1); err != nil {
		return "", err
	}
	if err := unix.Sendto(fd, []byte("who\n"), 0, sockaddr(args[1])); err != nil {
		return "", err
	}
	wait := []unix.PollFd{{Fd: int32(fd)}} // errors are always waited for
	if _, err := unix.Poll(wait, 2000); err != nil {
		return "", err
	}
	_, _, _, to, err := unix.Recvmsg(fd, make([]byte, 200), make([]byte, 200), unix.MSG_ERRQUEUE)
	if err != nil {
		return "", err
	}

	return "about " + addrPort(to).String(), nil
}

func sceneNonBlocking(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	first := unix.Connect(fd, sockaddr(args[0]))
	if second := unix.Connect(fd, sockaddr(args[0])); second != nil && second != unix.EALREADY {
		return "second connect: ", second
	}
	wait := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	if _, err := unix.Poll(wait, 2000); err != nil {
		return "", err
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		return "", err
	}
	answer, err := answerOn(fd)

	return errorWord(first) + ", EALREADY or done, " + answer, err
}

// sceneInherit hands a socket on, to a duplicate and to a process.
func sceneInherit(args []string) (string, error) {
	fd := 3
	if args[0] != "inherited" {
		var err error
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0); err != nil {
			return "", err
		}
		if err := unix.Connect(fd, sockaddr(args[0])); err != nil {
			return "", err
		}
	}
	one, err := answerOn(fd)
	if err != nil || args[0] == "inherited" {
		return one, err
	}
	duplicate, err := unix.Dup(fd)
	if err != nil {
		return "", err
	}
	two, err := answerOn(duplicate)
	if err != nil {
		return "", err
	}
	child := exec.Command("/proc/self/exe", "inherited")
	child.ExtraFiles = []*os.File{os.NewFile(uintptr(fd), "socket")}
	three, err := child.Output()

	return one + "; " + two + "; " + string(three), err
}

// sceneListenAfterConnect listens on a socket whose connect to args[1] has failed, and then
// gets a connection from the address of what would be its backend.
func sceneListenAfterConnect(args []string) (string, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		return "", err
	}
	if err := unix.Connect(fd, sockaddr(args[1])); err != unix.ECONNREFUSED {
		return "connect: ", err
	}
	if err := unix.Bind(fd, sockaddr("127.0.0.1:8080")); err != nil {
		return "", err
	}
	if err := unix.Listen(fd, 1); err != nil {
		return "", err
	}
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8081}}
	client, err := dialer.Dial("tcp4", "127.0.0.1:8080")
	if err != nil {
		return "", err
	}
	defer client.Close()
	_, peer, err := unix.Accept(fd)
	if err != nil {
		return "", err
	}

	return "peer " + addrPort(peer).String(), nil
}
