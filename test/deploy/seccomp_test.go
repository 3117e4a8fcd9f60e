package deploy

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
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

// testCapabilities: each one that the manifest grants is needed, the larger one
// cannot be had smaller, and the one of a component is good for something.
func testCapabilities(t *testing.T, k *kubelet) {
	all := k.mustSpec(t).Capabilities
	start := func(t *testing.T, capabilities ...string) *container {
		spec := k.mustSpec(t)
		whole := spec
		t.Cleanup(func() { k.mustExec(t, whole, "cleanup") })
		spec.Capabilities = capabilities

		return k.mustRun(t, spec)
	}
	t.Run("without SYS_ADMIN it cannot load programs", func(t *testing.T) {
		k.mustEnd(t, start(t, without(all, "SYS_ADMIN")...), "may not create maps or load programs, which takes SYS_ADMIN")
	})
	t.Run("with BPF and PERFMON instead, it cannot enter namespaces", func(t *testing.T) {
		k.mustEnd(t, start(t, append(without(all, "SYS_ADMIN"), "BPF", "PERFMON")...), "network namespace")
	})
	t.Run("without NET_ADMIN it cannot follow the node", func(t *testing.T) {
		k.mustEnd(t, start(t, without(all, "NET_ADMIN")...), "receive buffer")
	})
	t.Run("with SYS_RESOURCE, which a component adds, its oom_score_adj is as configured", func(t *testing.T) {
		if !held("SYS_RESOURCE") {
			t.Skip("root has no SYS_RESOURCE on this machine: what it is good for cannot be seen")
		}
		pod := *mustBuild(t, "overlays/kubeadm", "sys-resource").pod()
		agent := start(t, k.mustSpecOf(t, pod, pod.Containers[0]).Capabilities...)
		k.mustBeReady(t, agent)
		if got := agent.oomScore(t); got != "-999" { // kube-proxy's default
			t.Errorf("the agent's oom_score_adj is %s, want -999", got)
		}
		if out := agent.log.String(); strings.Contains(out, "oom_score_adj") {
			t.Errorf("the agent speaks of its oom_score_adj: %s", out)
		}
	})
}

// mustEnd waits until an agent ends with a message that it lacks a permission.
func (k *kubelet) mustEnd(t *testing.T, agent *container, what string) {
	t.Helper()
	lab.EventuallyIn(t, waitTimeout, "the agent ends", agent.ended)
	lines := strings.Split(strings.TrimSpace(agent.log.String()), "\n")
	last := lines[len(lines)-1]
	if agent.err == nil || !strings.Contains(last, what) || !strings.Contains(last, "operation not permitted") {
		t.Errorf("the agent ended with %v: %s; want a %s that it is not permitted", agent.err, last, what)
	}
}
