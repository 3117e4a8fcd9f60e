package conformance

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
	"github.com/sluice-lb/sluice/test/scene"
)

// An echo request to a ClusterIP is refused, as any other port of it, and to an
// address that is no Service's it is lost. (The node's own are lost either way: what is not
// TCP or UDP is not translated at sockets, and takes the default route.)
//
//	pod, outside ── web ── pod-1-0
func TestPing(t *testing.T) {
	t.Parallel()
	s := scene.MustShare(t)
	pod := s.Local()[0]
	s.SetEndpoints(t, "web", scene.ReadyAll(pod)...)
	ips := s.CreateService(t, "web").Spec.ClusterIPs
	for i, ip := range ips {
		for _, c := range []*scene.Client{s.Guest, s.Outside} {
			scene.MustReach(t, c.To("tcp", scene.At(ip, 80)), pod.Name)
			lab.Eventually(t, "a ping of "+ip+" from "+c.Name+" is refused", func() bool {
				return errors.Is(ping(t, c.Namespace, ip), unix.ECONNREFUSED)
			})
		}
		direct := []string{pod.IPv4.String(), pod.IPv6.String()}[i]
		if err := ping(t, s.Guest.Namespace, direct); err != nil {
			t.Errorf("ping of %s itself: %v", pod.Name, err)
		}
	}
	s.DeleteService(t, "web")
	for _, ip := range ips {
		scene.MustFail(t, s.Guest.To("tcp", scene.At(ip, 80)), scene.Dropped)
		if err := ping(t, s.Guest.Namespace, ip); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("ping of %s, which is no Service's: %v", ip, err)
		}
	}
}

// ping sends one echo request and waits for the answer, or for the error that it
// causes: EAGAIN if there is none within a second.
func ping(t *testing.T, from *lab.Namespace, address string) error {
	t.Helper()
	// Not even root may open such sockets otherwise.
	lab.Must(t, from.Sysctl("net/ipv4/ping_group_range", "0 0"))
	ip := netip.MustParseAddr(address)
	domain, protocol, request := unix.AF_INET, unix.IPPROTO_ICMP, byte(8)
	var to unix.Sockaddr
	if ip.Is6() {
		domain, protocol, request = unix.AF_INET6, unix.IPPROTO_ICMPV6, 128
		to = &unix.SockaddrInet6{Addr: ip.As16()}
	} else {
		to = &unix.SockaddrInet4{Addr: ip.As4()}
	}

	return from.Do(func() error {
		fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(fd)
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}); err != nil {
			return err
		}
		if err := unix.Connect(fd, to); err != nil {
			return os.NewSyscallError("connect", err)
		}
		if _, err := unix.Write(fd, []byte{request, 0, 0, 0, 0, 0, 0, 1}); err != nil {
			return os.NewSyscallError("write", err)
		}
		for err = unix.EINTR; errors.Is(err, unix.EINTR); {
			_, err = unix.Read(fd, make([]byte, 64))
		}

		return os.NewSyscallError("read", err)
	})
}
