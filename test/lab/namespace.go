package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace of the lab: lo is up, and IPv6 addresses are
// usable at once (no duplicate address detection, no router solicitation). No
// packet is refused for where it comes from (rp_filter), unless a test sets it. It
// has a name under /run/netns, so that `ip netns` shows it and
// `nsenter --net=/run/netns/NAME` enters it.
type Namespace struct {
	name   string
	file   *os.File
	handle *netlink.Handle
}

// NewNamespace makes a namespace. What is a word for people, part of its name.
// The caller closes it.
func NewNamespace(what string) (*Namespace, error) {
	prepare()

	name := newName(what)
	if err := newNamedNetns(name); err != nil {
		return nil, fmt.Errorf("new namespace %s: %w", name, err)
	}
	ns, err := openNamespace(name)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("namespace %s: %w", name, err), removeNetns(name))
	}

	return ns, nil
}

// openNamespace opens a namespace by its name and makes it usable.
func openNamespace(name string) (*Namespace, error) {
	file, err := os.Open(filepath.Join(netnsDir, name))
	if err != nil {
		return nil, err
	}
	handle, err := netlink.NewHandleAt(netns.NsHandle(file.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("netlink handle: %w", err), file.Close())
	}
	ns := &Namespace{name: name, file: file, handle: handle}
	if err := ns.makeUsable(); err != nil {
		handle.Close()
		return nil, errors.Join(err, file.Close())
	}

	return ns, nil
}

func (ns *Namespace) makeUsable() error {
	// Otherwise it is what the machine has, which differs.
	for _, conf := range []string{"all", "default"} {
		if err := ns.Sysctl("net/ipv4/conf/"+conf+"/rp_filter", "0"); err != nil {
			return err
		}
	}
	for _, conf := range []string{"all", "default"} {
		for _, setting := range []string{"accept_dad", "router_solicitations", "accept_ra"} {
			if err := ns.Sysctl("net/ipv6/conf/"+conf+"/"+setting, "0"); err != nil {
				return err
			}
		}
	}
	lo, err := ns.handle.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	if err := ns.handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("lo up: %w", err)
	}

	return nil
}

// Name is the file name under /run/netns.
func (ns *Namespace) Name() string { return ns.name }

// Path is the namespace as a file.
func (ns *Namespace) Path() string { return filepath.Join(netnsDir, ns.name) }

// Handle is the namespace as an open file, which [Namespace.Close] closes.
func (ns *Namespace) Handle() netns.NsHandle { return netns.NsHandle(ns.file.Fd()) }

// Netlink is a route netlink socket inside the namespace, which
// [Namespace.Close] closes.
func (ns *Namespace) Netlink() *netlink.Handle { return ns.handle }

// Do runs f inside the namespace, on the calling goroutine, and returns what f
// returns. Sockets that f creates belong to the namespace for good and may be
// used from anywhere. Goroutines that f starts run outside. A nil namespace is that
// of the calling thread.
//
// Should the way back fail, Do returns an error and leaves the goroutine locked
// to its thread: the thread ends with the goroutine, and no other goroutine gets it.
func (ns *Namespace) Do(f func() error) (err error) {
	if ns == nil {
		return f()
	}
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("namespace of this thread: %w", err)
	}
	defer func() {
		back := netns.Set(home)
		_ = home.Close() // of a read-only file
		if back != nil {
			err = errors.Join(err, fmt.Errorf("back from namespace %s: %w", ns.name, back))
			return
		}
		runtime.UnlockOSThread()
	}()
	if err := netns.Set(ns.Handle()); err != nil {
		return fmt.Errorf("enter namespace %s: %w", ns.name, err)
	}

	return f()
}

// Cookie is the kernel's number for the namespace (SO_NETNS_COOKIE), as
// bpf_get_netns_cookie returns it. Kernel 5.14 and later.
func (ns *Namespace) Cookie() (uint64, error) {
	var cookie uint64
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)

		return err
	})
	if err != nil {
		return 0, fmt.Errorf("cookie of namespace %s: %w", ns.name, err)
	}

	return cookie, nil
}

// Sysctl writes a setting of the namespace, named as under /proc/sys:
// "net/ipv4/ip_forward".
func (ns *Namespace) Sysctl(name, value string) error {
	return ns.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	})
}

// Close removes the name. The kernel takes the namespace and its devices away
// when the last process and the last socket inside are gone. Closing twice is
// not an error.
func (ns *Namespace) Close() error {
	if ns.file == nil {
		return nil
	}
	ns.handle.Close()
	err := errors.Join(ns.file.Close(), removeNetns(ns.name))
	ns.file = nil
	if err != nil {
		return fmt.Errorf("close namespace %s: %w", ns.name, err)
	}

	return nil
}

// Listen opens a TCP listener inside the namespace. Accept it from anywhere.
func (ns *Namespace) Listen(network, address string) (listener net.Listener, err error) {
	var config net.ListenConfig
	config.SetMultipathTCP(processProfile.MPTCP) // Go's default would be an MPTCP socket
	err = ns.Do(func() error {
		listener, err = config.Listen(context.Background(), network, address)
		return err
	})

	return listener, err
}

// ListenPacket opens a UDP socket or, as "ip4:132", a raw one inside the namespace,
// which reports with every datagram where it was sent to.
func (ns *Namespace) ListenPacket(network, address string) (conn net.PacketConn, err error) {
	config := net.ListenConfig{Control: func(network, _ string, raw syscall.RawConn) (err error) {
		controlErr := raw.Control(func(fd uintptr) {
			if network != "ip6" { // udp6 may be both
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			}
			if err == nil && (network == "udp6" || network == "ip6") {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
			}
		})
		return errors.Join(controlErr, err)
	}}
	err = ns.Do(func() error {
		conn, err = config.ListenPacket(context.Background(), network, address)
		return err
	})

	return conn, err
}

// Dial connects from inside the namespace. The socket is this process's: hooks
// on a cgroup of the lab do not see it, a [Caller]'s they do.
func (ns *Namespace) Dial(network, address string, timeout time.Duration) (conn net.Conn, err error) {
	dialer := net.Dialer{Timeout: timeout}
	dialer.SetMultipathTCP(processProfile.MPTCP)
	err = ns.Do(func() error {
		conn, err = dialer.Dial(network, address)
		return err
	})

	return conn, err
}
