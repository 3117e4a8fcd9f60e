package datapath

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
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
	// Tracing is that programs at tracepoints can read the storage of sockets (Linux 5.11).
	Tracing bool
	// Conntrack is that programs can look up the connections that netfilter tracks
	// (Linux 5.18, if it tracks any).
	Conntrack bool
	// ConntrackHidden is that it may track some that programs cannot look up (before Linux 5.18).
	ConntrackHidden bool
	// Unclear are the errors of probes whose answer is neither yes nor no. Their features are not
	// used, as if the kernel had none.
	Unclear []error
}

// ErrNoBTF is returned when the kernel was built without its own type
// information.
var ErrNoBTF = errors.New("the kernel has no BTF (CONFIG_DEBUG_INFO_BTF)")

// ErrOtherClock is returned when this process' clock is not that of programs: what they write into maps would seem idle, or to
// come from the future.
var ErrOtherClock = errors.New("the monotonic clock of this process is not the kernel's, as in a time namespace")

// ProbeFeatures probes the kernel. A probe that fails ends nothing: see Unclear of [Features].
// The error wraps [ErrNoBTF] or [ErrOtherClock] if Sluice cannot run on it, or there, and there is no other.
func ProbeFeatures() (Features, error) {
	// The kernel's own file is not parsed here, which takes a while: loading programs does.
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		if _, err := btf.LoadKernelSpec(); err != nil {
			return Features{}, fmt.Errorf("%w: %w", ErrNoBTF, err)
		}
	}
	// A limit that cannot be lifted only matters if a program cannot be loaded.
	unlifted := maps.LiftMemlock()
	var probed Features
	knows := func(what string, probe func() (bool, error)) bool {
		has, err := probe()
		if err == nil {
			return has
		}
		if unlifted != nil && errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w (%w)", err, unlifted)
		}
		probed.Unclear = append(probed.Unclear, fmt.Errorf("probe of %s: %w", what, err))

		return false
	}
	otherClock := knows("the clock of programs", func() (bool, error) { return hasOtherClock(maps.Now) })
	if otherClock {
		return Features{}, fmt.Errorf("%w: run it in the time namespace of the node", ErrOtherClock)
	}
	probed.SetRetval = knows("bpf_set_retval", bpf.KnowsSetRetval)
	knows("network namespace cookies", func() (_ bool, err error) {
		probed.NetnsCookie, err = node.NetnsCookie()

		return probed.NetnsCookie != 0, err
	})
	probed.TCX = knows("tcx", knowsTCX)
	// Helpers check flags first: an unknown one is EINVAL, and the invalid arguments
	// below are another error.
	probed.FIBSource = knows("source addresses of bpf_fib_lookup", func() (bool, error) {
		return helperKnows(unix.EAFNOSUPPORT, fibLookup(fibLookupSource))
	})
	probed.ChecksumIPv6 = knows("IPv6 in bpf_l4_csum_replace", func() (bool, error) {
		return helperKnows(unix.EFAULT, replaceChecksum(checksumIPv6))
	})
	probed.FIBMTU = knows("MTUs in bpf_fib_lookup", func() (bool, error) {
		version, err := features.LinuxVersionCode()

		return version >= linux5_12, err
	})
	probed.Tracing = knows("tracing", bpf.KnowsTracing)
	probed.ConntrackHidden = !knows("connection tracking", func() (shown bool, err error) {
		if probed.Conntrack, err = bpf.KnowsConntrack(); err != nil || probed.Conntrack {
			return err == nil, err
		}

		return bpf.ShowsConntrack()
	})

	return probed, nil
}

func knowsTCX() (bool, error) {
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopbackIndex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, unix.EINVAL) {
		return false, nil // no such hook
	}

	return err == nil, err
}

// Compiles reports whether the kernel compiles programs to machine code.
func Compiles() (bool, error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sluice_probe", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return false, fmt.Errorf("probe of the compiler: %w", err)
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return false, fmt.Errorf("probe of the compiler: %w", err)
	}
	if _, err = info.JitedSize(); errors.Is(err, ebpf.ErrNotSupported) {
		return false, nil
	}

	return err == nil, err
}

const (
	loopbackIndex   = 1
	fibLookupSource = 1 << 4 // BPF_FIB_LOOKUP_SRC
	linux5_12       = 5<<16 | 12<<8
	checksumIPv6    = 1 << 7 // BPF_F_IPV6
)

// helperKnows runs a program that calls a helper, and reports whether the helper knows
// its flag: it returns the error known if it does, and EINVAL if it does not.
func helperKnows(known unix.Errno, call asm.Instructions) (bool, error) {
	result, err := runProbe(call)
	if err != nil {
		return false, err
	}
	switch got := unix.Errno(-int32(result)); got {
	case known:
		return true, nil
	case unix.EINVAL:
		return false, nil
	default:
		return false, fmt.Errorf("result %w", got)
	}
}

// runProbe runs a program once, and returns the low half of its register 0.
func runProbe(instructions asm.Instructions) (uint32, error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sluice_probe", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: append(instructions, asm.Return()),
	})
	if err != nil {
		return 0, err
	}
	defer program.Close()

	return program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
}

// hasOtherClock reports whether now is another clock than that of programs, to about a millisecond.
func hasOtherClock(now func() uint64) (bool, error) {
	const shift = 20
	before := uint32(now() >> shift)
	at, err := runProbe(asm.Instructions{asm.FnKtimeGetNs.Call(), asm.RSh.Imm(asm.R0, shift)})
	after := uint32(now() >> shift)

	return at-before > after-before, err // they may wrap
}

// fibLookup returns a lookup of an address without a family.
func fibLookup(flags int32) asm.Instructions {
	const size = 64 // of struct bpf_fib_lookup
	call := asm.Instructions{asm.Mov.Imm(asm.R0, 0)}
	for offset := int16(-size); offset < 0; offset += 8 {
		call = append(call, asm.StoreMem(asm.RFP, offset, asm.R0, asm.DWord))
	}

	return append(call,
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -size),
		asm.Mov.Imm(asm.R3, size),
		asm.Mov.Imm(asm.R4, flags),
		asm.FnFibLookup.Call(),
	)
}

// replaceChecksum returns the replacement of a checksum at an odd offset.
func replaceChecksum(flags int32) asm.Instructions {
	return asm.Instructions{
		asm.Mov.Imm(asm.R2, 1),
		asm.Mov.Imm(asm.R3, 0),
		asm.Mov.Imm(asm.R4, 0),
		asm.Mov.Imm(asm.R5, flags),
		asm.FnL4CsumReplace.Call(),
	}
}

// Missing returns what the kernel lacks, each with what that costs, and which probes gave no answer.
func (f Features) Missing() []string {
	var missing []string
	for _, feature := range []struct {
		has  bool
		text string
	}{
		{f.SetRetval, "no bpf_set_retval (Linux 6.1): a refused sendto fails with EPERM"},
		{f.NetnsCookie != 0, "no network namespace cookies (Linux 5.14): the node must be in the kernel's first namespace"},
		{f.TCX, "no tcx (Linux 6.6): devices have clsact filters, which others can replace"},
		{f.Tracing, "no storage of sockets at tracepoints (Linux 5.11): TCP handshakes and retransmissions are not measured, and backends that do not answer are only noticed at devices"},
		{f.FIBMTU, "no MTUs in bpf_fib_lookup (Linux 5.12): packets to backends on other nodes pass the network stack"},
		{!f.ConntrackHidden, "no lookups of netfilter's connections (Linux 5.18): packets of no known connection to a Service pass and are not reset, and a masqueraded connection may get the port of one of netfilter's"},
		{f.FIBSource, "no source addresses from bpf_fib_lookup (Linux 6.7): a route's own preferred source is not used to masquerade"},
	} {
		if !feature.has {
			missing = append(missing, feature.text)
		}
	}
	for _, err := range f.Unclear {
		missing = append(missing, err.Error()+", which is taken for a no")
	}

	return missing
}
