package datapath

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// The probe distinguishes a flag that no kernel has from one that all have.
func TestHelperKnows(t *testing.T) {
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
	features, err := ProbeFeatures()
	lab.Must(t, err)
	version := kernelVersion(t)
	for _, test := range []struct {
		name  string
		since [2]int
		has   bool
		exact bool
	}{
		{"tcx", [2]int{6, 6}, features.TCX, true},
		{"a bpf_fib_lookup of MTUs", [2]int{5, 12}, features.FIBMTU, true},
		{"BPF_FIB_LOOKUP_SRC", [2]int{6, 7}, features.FIBSource, true},
		{"BPF_F_IPV6", [2]int{6, 16}, features.ChecksumIPv6, false},
	} {
		isNew := version[0] > test.since[0] || version[0] == test.since[0] && version[1] >= test.since[1]
		if isNew && !test.has || test.exact && !isNew && test.has {
			t.Errorf("%s on Linux %d.%d: %t", test.name, version[0], version[1], test.has)
		}
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
