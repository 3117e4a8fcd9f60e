package datapath

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// The probe distinguishes a flag that no kernel has from one that all have.
func TestHelperKnows(t *testing.T) {
	lab.NeedsRoot(t)
	const output = 1 << 1 // BPF_FIB_LOOKUP_OUTPUT (Linux 4.18)
	const pseudo = 1 << 4 // BPF_F_PSEUDO_HDR (Linux 4.1)
	const never = 1 << 30
	for _, test := range []struct {
		name  string
		known unix.Errno
		call  asm.Instructions
		want  bool
	}{
		{"a flag of bpf_fib_lookup", unix.EAFNOSUPPORT, fibLookup(output), true},
		{"no flag of bpf_fib_lookup", unix.EAFNOSUPPORT, fibLookup(never), false},
		{"a flag of bpf_l4_csum_replace", unix.EFAULT, replaceChecksum(pseudo), true},
		{"no flag of bpf_l4_csum_replace", unix.EFAULT, replaceChecksum(never), false},
	} {
		t.Run("it is "+test.name, func(t *testing.T) {
			got, err := helperKnows(test.known, test.call)
			lab.Must(t, err)
			if got != test.want {
				t.Errorf("known: %t", got)
			}
		})
	}
	if _, err := helperKnows(unix.EPERM, replaceChecksum(pseudo)); err == nil {
		t.Error("no error for an unexpected result")
	}
}

// The features agree with the version that introduced them, where that is certain:
// distributions backport features to older kernels.
func TestDeviceFeatures(t *testing.T) {
	lab.NeedsRoot(t)
	features, err := ProbeFeatures()
	lab.Must(t, err)
	for _, err := range features.Unclear {
		t.Error(err)
	}
	version := kernelVersion(t)
	for _, test := range []struct {
		name  string
		since [2]int
		has   bool
		exact bool
	}{
		{"bpf_set_retval", [2]int{6, 1}, features.SetRetval, true},
		{"cookies of network namespaces", [2]int{5, 14}, features.NetnsCookie != 0, true},
		{"tcx", [2]int{6, 6}, features.TCX, true},
		{"a bpf_fib_lookup of MTUs", [2]int{5, 12}, features.FIBMTU, true},
		{"BPF_FIB_LOOKUP_SRC", [2]int{6, 7}, features.FIBSource, false},
		{"BPF_F_IPV6", [2]int{6, 16}, features.ChecksumIPv6, false},
	} {
		isNew := version[0] > test.since[0] || version[0] == test.since[0] && version[1] >= test.since[1]
		if isNew && !test.has || test.exact && !isNew && test.has {
			t.Errorf("%s on Linux %d.%d: %t", test.name, version[0], version[1], test.has)
		}
	}
}

// A probe that fails is a feature that is not used: it is reported, and the others go on.
func TestUnclearProbes(t *testing.T) {
	lab.NeedsRoot(t)
	// The library remembers for all threads what the first one was allowed to.
	features, err := ProbeFeatures()
	lab.Must(t, err)
	if _, err := link.QueryPrograms(link.QueryOptions{Target: -1, Attach: ebpf.AttachCGroupInetIngress}); !errors.Is(err, unix.EBADF) {
		t.Fatalf("query of a cgroup that is none: %v", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread without capabilities ends with this goroutine
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err = unix.Capset(&header, &none[0]); err == nil {
			features, err = ProbeFeatures()
		}
	}()
	<-done
	lab.Must(t, err)
	if features.SetRetval || features.TCX || features.FIBSource || features.ChecksumIPv6 {
		t.Errorf("features of a kernel that answers no probe: %+v", features)
	}
	if version := kernelVersion(t); features.FIBMTU != (version != [2]int{5, 10}) {
		t.Errorf("a bpf_fib_lookup of MTUs on Linux %v: %t, which needs no probe that fails", version, features.FIBMTU)
	}
	missing := strings.Join(features.Missing(), "; ")
	for _, probe := range []string{"bpf_set_retval", "tcx", "source addresses of bpf_fib_lookup", "IPv6 in bpf_l4_csum_replace"} {
		if !strings.Contains(missing, "probe of "+probe+": ") {
			t.Errorf("nothing of the probe of %s in %q", probe, missing)
		}
	}
	if !strings.Contains(missing, "operation not permitted") {
		t.Errorf("nothing of the cause in %q", missing)
	}
}

func kernelVersion(t testing.TB) [2]int {
	t.Helper()
	var name unix.Utsname
	lab.Must(t, unix.Uname(&name))
	var version [2]int
	_, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &version[0], &version[1])
	lab.Must(t, err)

	return version
}
