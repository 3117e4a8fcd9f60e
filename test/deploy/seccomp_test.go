package deploy

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// refusedCalls are those that the default profiles of containerd and CRI-O refuse
// a container with SYS_ADMIN and without SYS_PTRACE, SYS_NICE and the like, as far
// as a Go program could call them. Old versions do not know pidfd_open and similar
// calls, and refuse what they do not know. (bpf, setns and clone3 are allowed with
// SYS_ADMIN; without it they are not.)
var refusedCalls = []uint32{
	unix.SYS_ACCT, unix.SYS_ADD_KEY, unix.SYS_ADJTIMEX, unix.SYS_CLOCK_SETTIME, unix.SYS_DELETE_MODULE,
	unix.SYS_FINIT_MODULE, unix.SYS_GET_MEMPOLICY, unix.SYS_INIT_MODULE, unix.SYS_IO_URING_ENTER,
	unix.SYS_IO_URING_REGISTER, unix.SYS_IO_URING_SETUP, unix.SYS_KCMP, unix.SYS_KEXEC_LOAD,
	unix.SYS_KEYCTL, unix.SYS_MBIND, unix.SYS_MOVE_PAGES, unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_PIDFD_GETFD,
	unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV,
	unix.SYS_PTRACE, unix.SYS_REBOOT, unix.SYS_REQUEST_KEY, unix.SYS_SET_MEMPOLICY, unix.SYS_SETTIMEOFDAY,
	unix.SYS_SWAPOFF, unix.SYS_SWAPON, unix.SYS_USERFAULTFD, unix.SYS_VHANGUP,
}

// auditArch is the kernel's word for our architecture, without which a number
// says nothing.
var auditArch = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

const offsetOfNumber, offsetOfArch = 0, 4 // in struct seccomp_data

// restrictCalls has the kernel refuse this thread such system calls (EPERM), and
// whatever it becomes.
func restrictCalls() error {
	const (
		allow  = 0x7fff0000 // SECCOMP_RET_ALLOW
		refuse = 0x00050000 | uint32(unix.EPERM)
	)
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offsetOfArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArch[runtime.GOARCH], SkipTrue: 1},
		bpf.RetConstant{Val: refuse},
		bpf.LoadAbsolute{Off: offsetOfNumber, Size: 4},
	}
	for i, call := range refusedCalls {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: call, SkipTrue: uint8(len(refusedCalls) - i)})
	}
	program = append(program, bpf.RetConstant{Val: allow}, bpf.RetConstant{Val: refuse})
	raw, err := bpf.Assemble(program)
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	var filters []unix.SockFilter
	for _, is := range raw {
		filters = append(filters, unix.SockFilter{Code: is.Op, Jt: is.Jt, Jf: is.Jf, K: is.K})
	}
	whole := unix.SockFprog{Len: uint16(len(filters)), Filter: &filters[0]}
	err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&whole)), 0, 0)
	runtime.KeepAlive(filters)
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}

	return nil
}
