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

// Features is what the running kernel has, probed once.
type Features struct {
	// SetRetval: connect and sendmsg hooks may choose their errno (Linux 6.1).
	SetRetval bool
	// NetnsCookie is the cookie of the calling thread's network namespace,
	// or zero where the kernel does not tell it (before Linux 5.14): then
	// the node's namespace must be the kernel's first.
	NetnsCookie uint64
	// TCX: programs can be attached to devices as links (Linux 6.6).
	TCX bool
	// FIBSource: bpf_fib_lookup tells source addresses (Linux 6.7).
	FIBSource bool
	// FIBMTU: bpf_fib_lookup compares the length of a packet with the MTU of its route (Linux 5.12).
	FIBMTU bool
	// ChecksumIPv6: bpf_l4_csum_replace knows BPF_F_IPV6 (Linux 6.16, and
	// later versions of older ones).
	ChecksumIPv6 bool
	// Conntrack: programs can ask netfilter which connections it tracks (Linux 5.18, if it
	// tracks any).
	Conntrack bool
}

// ErrNoBTF is returned when the kernel was built without its own type
// information.
var ErrNoBTF = errors.New("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")

// ProbeFeatures asks the kernel. The error wraps [ErrNoBTF] if Sluice cannot
// run on it.
func ProbeFeatures() (Features, error) {
	if err := haveBTF(); err != nil {
		return Features{}, fmt.Errorf("%w: %w", ErrNoBTF, err)
	}
	// If the limit cannot be lifted, that matters only where a program cannot be loaded for it.
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

// haveBTF says whether the kernel's types can be had. They are not read where the
// kernel has them: that takes a while, and is done when programs are loaded.
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
