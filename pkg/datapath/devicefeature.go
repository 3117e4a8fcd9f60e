package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// probeDevices probes the features that programs of devices use.
func (f *Features) probeDevices() error {
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopbackIndex, Attach: ebpf.AttachTCXIngress})
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("probe of tcx: %w", err)
	}
	f.TCX = err == nil

	// Helpers check flags first: an unknown one is EINVAL, and the invalid arguments
	// below are another error.
	if f.FIBSource, err = helperKnows(unix.EAFNOSUPPORT, fibLookup(fibLookupSource)); err != nil {
		return fmt.Errorf("probe of bpf_fib_lookup: %w", err)
	}
	version, err := features.LinuxVersionCode()
	if err != nil {
		return fmt.Errorf("version of the kernel: %w", err)
	}
	f.FIBMTU = version >= linux5_12
	if f.ChecksumIPv6, err = helperKnows(unix.EFAULT, replaceChecksum(checksumIPv6)); err != nil {
		return fmt.Errorf("probe of bpf_l4_csum_replace: %w", err)
	}

	return nil
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
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sluice_probe", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: append(call, asm.Return()),
	})
	if err != nil {
		return false, err
	}
	defer program.Close()
	result, err := program.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
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
