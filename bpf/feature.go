package bpf

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// KnowsSetRetval reports whether programs at connect and sendmsg can choose their errno, see
// [Config].SetRetval (Linux 6.1). The call of the probe is one that every verifier admits.
func KnowsSetRetval() (bool, error) {
	program, err := ebpf.NewProgramWithOptions(&ebpf.ProgramSpec{
		Name: "sluice_probe", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, 0), asm.FnSetRetval.Call(), asm.Mov.Imm(asm.R0, 1), asm.Return(),
		},
	}, ebpf.ProgramOptions{LogLevel: ebpf.LogLevelBranch})
	if err == nil {
		return true, program.Close()
	}
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) && errors.Is(err, unix.EINVAL) && slices.ContainsFunc(refused.Log, refusesHelper) {
		return false, nil
	}

	return false, err
}

// refusesHelper reports whether a verifier says, in this line of its log, that there is no such
// helper, or none for this type of program.
func refusesHelper(line string) bool {
	return strings.Contains(line, "invalid func") || strings.Contains(line, "unknown func") || strings.Contains(line, "cannot use helper")
}

// KnowsTracing reports whether programs at tracepoints can read the storage of sockets (Linux 5.11).
func KnowsTracing() (bool, error) { return isAtLeast(5, 11) }

// ShowsConntrack reports whether netfilter tracks no connection that programs cannot look up, see
// [DeviceConfig].ConntrackHidden: since Linux 5.18.
func ShowsConntrack() (bool, error) { return isAtLeast(5, 18) }

func isAtLeast(major, minor uint32) (bool, error) {
	version, err := features.LinuxVersionCode()
	if err != nil {
		return false, fmt.Errorf("version of the kernel: %w", err)
	}

	return version >= major<<16|minor<<8, nil
}

// typesOfKernel are the types and functions of the kernel, and of its connection tracking if that
// is a loaded module.
var typesOfKernel = []string{"/sys/kernel/btf/vmlinux", "/sys/kernel/btf/nf_conntrack"}

// KnowsConntrack reports whether programs can look up connections that netfilter tracks, see
// [DeviceConfig].Conntrack: since Linux 5.18, if the module is loaded or built in. It searches
// for the name of the function, because reading the types is slow.
func KnowsConntrack() (bool, error) {
	for _, path := range typesOfKernel {
		knows, err := fileContains(path, "bpf_skb_ct_lookup")
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || knows {
			return knows, err
		}
	}

	return false, nil
}

// fileContains reports whether a file contains a text.
func fileContains(path, text string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	buffer := make([]byte, 256<<10)
	kept := 0 // bytes of the part before, in which the text may begin
	for {
		n, err := f.Read(buffer[kept:])
		if bytes.Contains(buffer[:kept+n], []byte(text)) {
			return true, nil
		}
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("%s: %w", path, err)
		}
		end := kept + n
		kept = min(end, len(text)-1)
		copy(buffer, buffer[end-kept:end])
	}
}
