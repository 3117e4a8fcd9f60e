package datapath

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
)

// ProbeAddr is the address of the reserved frontends: the IPv4 dummy address (RFC 7600), which
// packets must not have. Every instance of Sluice has it as a ClusterIP with a port of its own, see [ProbePort],
// and with [CommonProbePort]. It refuses all other ports.
var ProbeAddr = netip.MustParseAddr("192.0.0.8")

// CommonProbePort is the port that every instance has, discard. Builds that know no other one refuse it.
const CommonProbePort = 9

// refusedProbePort is a port that no instance has.
const refusedProbePort = 1

// ProbeBackend is the one backend of the reserved frontends. The kernel refuses a connection to
// this address by an error of its own (ENETUNREACH), and sends no packet.
var ProbeBackend = netip.MustParseAddrPort("255.255.255.255:9")

// ProbePort returns the port that only the instance with this map of frontends has.
// The kernel numbers maps one after the other, so that instances have different ports.
func ProbePort(frontends ebpf.MapID) uint16 {
	const first = CommonProbePort + 1

	return uint16(first + uint32(frontends)%(math.MaxUint16-first+1))
}

// pinnedProbePort returns the port of the instance that is pinned below a bpf root.
func pinnedProbePort(bpfRoot string) (uint16, error) {
	pinned, err := ebpf.LoadPinnedMap(maps.PinOf(bpfRoot, maps.NameFrontends), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return 0, fmt.Errorf("pinned map of frontends: %w", err)
	}
	info, err := pinned.Info()
	if err := errors.Join(err, pinned.Close()); err != nil {
		return 0, fmt.Errorf("map of frontends: %w", err)
	}
	id, _ := info.ID()

	return ProbePort(id), nil
}

// ProbeVerb is the argument with which [Verify] starts this program's own executable,
// which then calls [ProbeMain].
const ProbeVerb = "probe-hooks"

// ErrNotEffective is returned when a socket in the cgroup root is not translated by the maps of
// this instance, even if the kernel lists our programs as attached.
var ErrNotEffective = errors.New("sockets are not translated")

// ErrNotProbed is returned when the process that probes the hooks failed, so that
// nothing is known of them.
var ErrNotProbed = errors.New("hooks could not be tried")

// ErrSlow is returned when that process took too long, as on a machine that is too busy: no trial
// has failed. It wraps [ErrNotProbed].
var ErrSlow = fmt.Errorf("%w: the trial takes too long", ErrNotProbed)

// probeTimeout is the timeout of that process, and dialTimeout that of each of its
// sockets: if the kernel routes loopback addresses (route_localnet, which kube-proxy
// in iptables mode leaves behind), no answer comes.
const (
	probeTimeout = 10 * time.Second
	dialTimeout  = time.Second
)

// Verify tries the hooks of the instance that is pinned below bpfRoot: it starts a process in
// cgroupRoot that dials the reserved frontends. It returns
// an error wrapping [ErrNotEffective] if our programs do not translate these by our maps (those of another
// instance, which run first, refuse one of them), and one wrapping [ErrNotProbed] if it could not be tried, or [ErrSlow] if not in time.
// The reserved frontends must be in the maps. Only if hooks have no effect, a SYN may leave the node, which reaches at
// most the next hop.
//
// If this process is in that cgroup already, the new process inherits it. It is moved
// only if it must be: the kernel lets no process into a cgroup with controllers for
// its children (EBUSY), nor out of a cgroup namespace if nsdelegate is set (ENOENT),
// and a seccomp profile may forbid clone3.
func Verify(ctx context.Context, bpfRoot, cgroupRoot string) error {
	if err := checkCgroup2(cgroupRoot); err != nil {
		return fmt.Errorf("cgroup root: %w", err)
	}
	port, err := pinnedProbePort(bpfRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no maps of this build are pinned below %s", ErrNotEffective, bpfRoot)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNotProbed, err)
	}

	return verify(ctx, cgroupRoot, port)
}

// Verify is [Verify] for this instance, also if its maps have no pins.
func (d *Datapath) Verify(ctx context.Context) error {
	frontends, err := d.maps.ID(maps.NameFrontends)
	if err != nil {
		return err
	}

	return verify(ctx, d.cfg.CgroupRoot, ProbePort(frontends))
}

func verify(ctx context.Context, cgroupRoot string, port uint16) error {
	cgroup, err := os.Open(cgroupRoot)
	if err != nil {
		return fmt.Errorf("cgroup root: %w", err)
	}
	defer cgroup.Close()

	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", ProbeVerb, strconv.Itoa(int(port)))
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

// ProbeMain is the main function of the process that [Verify] starts, with the port as its argument. It returns the
// exit code.
func ProbeMain(port string) int {
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		fmt.Printf("port: %v\n", err)

		return 1
	}
	mapped := netip.MustParseAddr("::ffff:127.0.0.1").As16()

	code := 0
	for _, probe := range []struct {
		hook   string
		family int
		bind   unix.Sockaddr
		port   int
		want   error
	}{
		// Without a route to it, the kernel refuses what is not translated as it does the backend: a program has to refuse.
		{"connect4", unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, refusedProbePort, unix.ECONNREFUSED},
		{"connect6", unix.AF_INET6, &unix.SockaddrInet6{Addr: mapped}, refusedProbePort, unix.ECONNREFUSED},
		{"connect4", unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, int(number), unix.ENETUNREACH},
		{"connect6", unix.AF_INET6, &unix.SockaddrInet6{Addr: mapped}, int(number), unix.ENETUNREACH},
		{"connect4", unix.AF_INET, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, CommonProbePort, unix.ENETUNREACH},
	} {
		var dial unix.Sockaddr = &unix.SockaddrInet4{Addr: ProbeAddr.As4(), Port: probe.port}
		if probe.family == unix.AF_INET6 {
			dial = &unix.SockaddrInet6{Addr: ProbeAddr.As16(), Port: probe.port}
		}
		err := dialBound(probe.family, probe.bind, dial)
		if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, probe.want) {
			continue // the former on a node without IPv6
		}
		code = probeNotEffective
		fmt.Printf("%s: connect to %s:%d: %v, want %v\n", probe.hook, ProbeAddr, probe.port, err, probe.want)
		if errors.Is(err, unix.ECONNREFUSED) {
			fmt.Println("programs of another instance or build of Sluice are in charge")

			break
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
