package datapath

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// Features are the features of the running kernel that not all kernels have.
type Features struct {
	// SetRetval is that connect and sendmsg hooks can choose their errno (Linux 6.1).
	SetRetval bool
	// NetnsCookie is the cookie of the calling thread's network namespace. It is zero
	// before Linux 5.14, where the node's namespace must be the kernel's initial one.
	NetnsCookie uint64
	// TCX is that programs can be attached to devices as links (Linux 6.6).
	TCX bool
	// FIBSource is that bpf_fib_lookup returns source addresses (Linux 6.7).
	FIBSource bool
	// FIBMTU is that bpf_fib_lookup compares a packet's length with the MTU of its route (Linux 5.12).
	FIBMTU bool
	// ChecksumIPv6 is that bpf_l4_csum_replace knows BPF_F_IPV6 (Linux 6.16, and
	// stable releases of older versions).
	ChecksumIPv6 bool
	// Conntrack is that programs can look up the connections that netfilter tracks
	// (Linux 5.18, if it tracks any).
	Conntrack bool
}

// ErrNoBTF is returned when the kernel was built without its own type
// information.
var ErrNoBTF = errors.New("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")

// ProbeFeatures probes the kernel. The error wraps [ErrNoBTF] if Sluice cannot run
// on it.
func ProbeFeatures() (Features, error) {
	if err := haveBTF(); err != nil {
		return Features{}, fmt.Errorf("%w: %w", ErrNoBTF, err)
	}
	// A limit that cannot be lifted only matters if a program cannot be loaded.
	unlifted := maps.LiftMemlock()
	err := features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnSetRetval)
	if err != nil && !errors.Is(err, ebpf.ErrNotSupported) {
		return Features{}, errors.Join(unlifted, fmt.Errorf("probe of bpf_set_retval: %w", err))
	}
	probed := Features{SetRetval: err == nil}
	if probed.NetnsCookie, err = netnsCookie(); err != nil {
		return Features{}, err
	}

	if probed.Conntrack, err = bpf.KnowsConntrack(); err != nil {
		return Features{}, fmt.Errorf("probe of connection tracking: %w", err)
	}

	return probed, probed.probeDevices()
}

// haveBTF returns an error unless the kernel's types are available. It does not parse
// those that the kernel provides itself, which takes a while: loading programs does.
func haveBTF() error {
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err == nil {
		return nil
	}
	_, err := btf.LoadKernelSpec()

	return err
}

// netnsCookie returns the cookie of the calling thread's network namespace, or
// zero before Linux 5.14.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket for the namespace cookie: %w", err)
	}
	defer unix.Close(fd)

	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("namespace cookie: %w", err)
	}

	return cookie, nil
}
