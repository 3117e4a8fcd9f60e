package lab

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// kernelVariable names the kernel and the packages that tests run on, or is "none": then
// they use no kernel. go keeps results of tests apart by the variables that they read.
const kernelVariable = "SLUICE_TEST_KERNEL"

// NeedsRoot skips the test without root, and where tests are to use no kernel.
func NeedsRoot(t testing.TB) {
	t.Helper()
	if os.Getenv(kernelVariable) == "none" {
		t.Skip("needs a kernel, and " + kernelVariable + " is none")
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	LookAtProduct(t)
}

// LookAtProduct makes the sources of the binary, and what is deployed with it, inputs of a
// test below test: go keeps results of tests by the files that they have looked at, and does
// not see what a command such as `go build` has read.
func LookAtProduct(t testing.TB) {
	t.Helper()
	Must(t, lookAtProduct())
}

var lookAtProduct = sync.OnceValue(func() error {
	folder, err := os.Getwd()
	if err != nil {
		return err
	}
	end := strings.LastIndex(folder+"/", "/test/")
	if end < 0 {
		return nil
	}
	root := folder[:end]
	if _, err := os.Stat(filepath.Join(root, "go.sum")); errors.Is(err, fs.ErrNotExist) {
		return nil // the demo, which may run anywhere
	}
	for _, name := range []string{"bpf", "cmd", "deploy", "maps", "pkg", "test/cluster", "test/ui", "Makefile", "Dockerfile", "go.mod"} {
		err := filepath.WalkDir(filepath.Join(root, name), func(path string, _ fs.DirEntry, err error) error {
			if err == nil {
				_, err = os.Stat(path)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil // `make generate` has removed it meanwhile
			}

			return err
		})
		if err != nil {
			return err
		}
	}

	return filepath.WalkDir(folder, func(_ string, _ fs.DirEntry, err error) error { return err })
})

// NeedsVLANs skips the test if the kernel has no VLANs. Debian's kernels have them: see test/kernels.
func NeedsVLANs(t testing.TB) {
	t.Helper()
	NeedsRoot(t)
	ns := MustNamespace(t, "vlans")
	Must(t, ns.AddBridge("br0"))
	err := ns.AddVLAN("br0", "vlan7", 7)
	if errors.Is(err, unix.EOPNOTSUPP) {
		t.Skip("this kernel has no VLANs (module 8021q)")
	}
	Must(t, err)
}
