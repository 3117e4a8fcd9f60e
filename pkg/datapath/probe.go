package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ProbeAddr is the reserved frontend: TCP, without a backend. Its address is the IPv4
// dummy address (RFC 7600), which packets must not have; its port is discard.
var ProbeAddr = netip.MustParseAddrPort("192.0.0.8:9")

// ProbeVerb is the argument with which [Verify] starts this program's own executable,
// which then calls [ProbeMain].
const ProbeVerb = "probe-hooks"

// ErrNotEffective is returned when a socket in the cgroup root is not translated, even
// if the kernel lists our programs as attached.
var ErrNotEffective = errors.New("sockets are not translated")

// ErrNotProbed is returned when the process that probes the hooks failed, so that
// nothing is known of them.
var ErrNotProbed = errors.New("hooks could not be tried")

// ErrSlow is returned when that process took too long, as on a machine that is too busy: no trial
// has failed. It wraps [ErrNotProbed].
var ErrSlow = fmt.Errorf("%w: the trial takes too long", ErrNotProbed)

// probeTimeout is the timeout of that process, and dialTimeout that of each of its two
// sockets: if the kernel routes loopback addresses (route_localnet, which kube-proxy
// in iptables mode leaves behind), no answer comes.
const (
	probeTimeout = 10 * time.Second
	dialTimeout  = time.Second
)

// Verify starts a process in cgroupRoot that dials the reserved frontend. It returns
// an error wrapping [ErrNotEffective] if our programs do not refuse that, and one
// wrapping [ErrNotProbed] if it could not be tried, or [ErrSlow] if not in time. The reserved frontend must be in
// the maps. Only if hooks have no effect, a SYN may leave the node, which reaches at
// most the next hop.
//
// If this process is in that cgroup already, the new process inherits it. It is moved
// only if it must be: the kernel lets no process into a cgroup with controllers for
// its children (EBUSY), nor out of a cgroup namespace if nsdelegate is set (ENOENT),
// and a seccomp profile may forbid clone3.
func Verify(ctx context.Context, cgroupRoot string) error {
	cgroup, err := os.Open(cgroupRoot)
	if err != nil {
		return fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()

	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", ProbeVerb)
	if id, err := cgroupID(cgroupRoot); (err != nil || id != rootCgroupID) && !holdsThisProcess(cgroupRoot) {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	}
	out, err := cmd.CombinedOutput()
	exit := new(exec.ExitError)
	if errors.As(err, &exit) && exit.ExitCode() == probeNotEffective {
		return fmt.Errorf("%w: %s", ErrNotEffective, strings.TrimSpace(string(out)))
	}
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ErrSlow
	}
	if err != nil {
		return fmt.Errorf("%w: %w: %s", ErrNotProbed, err, strings.TrimSpace(string(out)))
	}

	return nil
}

const probeNotEffective = 3

// ProbeMain is the main function of the process that [Verify] starts. It returns the
// exit code.
func ProbeMain() int {
	v4 := &unix.SockaddrInet4{Port: int(ProbeAddr.Port()), Addr: ProbeAddr.Addr().As4()}
	v6 := &unix.SockaddrInet6{Port: v4.Port, Addr: ProbeAddr.Addr().As16()}
	mapped := netip.MustParseAddr("::ffff:127.0.0.1").As16()

	code := 0
	for _, probe := range []struct {
		hook       string
		family     int
		bind, dial unix.Sockaddr
	}{
		{"connect4", unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, v4},
		{"connect6", unix.AF_INET6, &unix.SockaddrInet6{Addr: mapped}, v6},
	} {
		err := dialBound(probe.family, probe.bind, probe.dial)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue // a node without IPv6
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			fmt.Printf("%s: connect to %s: %v, want %v\n", probe.hook, ProbeAddr, err, unix.ECONNREFUSED)
			code = probeNotEffective
		}
	}

	return code
}

// dialBound connects a TCP socket that is bound to loopback. Without our programs the
// kernel has no route from there to the dummy address (EINVAL), or its SYN reaches at
// most the next hop.
func dialBound(family int, bind, dial unix.Sockaddr) error {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, bind); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	timeout := unix.NsecToTimeval(dialTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &timeout); err != nil {
		return fmt.Errorf("timeout: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TTL, 1); err != nil {
		return fmt.Errorf("time to live: %w", err)
	}

	return unix.Connect(fd, dial)
}
