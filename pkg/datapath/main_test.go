package datapath

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == ProbeVerb {
		os.Exit(ProbeMain())
	}
	playScene()
	lab.Main()
	sweepRoots()
	os.Exit(m.Run())
}

// rootPattern names bpf roots of tests after the process that created them.
const rootPattern = "/sys/fs/bpf/sluice-test-%d-%s"

// sweepRoots removes the pins of test runs that have died.
func sweepRoots() {
	roots, _ := filepath.Glob(strings.NewReplacer("%d", "*", "%s", "*").Replace(rootPattern))
	for _, root := range roots {
		var owner int
		_, err := fmt.Sscanf(root, strings.TrimSuffix(rootPattern, "-%s"), &owner)
		if err == nil && unix.Kill(owner, 0) == unix.ESRCH {
			_ = Remove(root)
		}
	}
}
