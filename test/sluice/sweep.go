package sluice

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

const bpffs = "/sys/fs/bpf"

// nodePattern names a node's folder and its pins after the process that made
// them.
const nodePattern = "sluice-node-%d-%s"

// sweep removes what processes that died have left pinned. Their agents went
// with their cgroups, see [lab.Sweep].
var sweep = sync.OnceFunc(func() {
	owned := strings.TrimSuffix(nodePattern, "-%s")
	for _, parent := range []string{bpffs, os.TempDir()} {
		left, _ := filepath.Glob(filepath.Join(parent, "sluice-node-*"))
		for _, path := range left {
			var owner int
			_, err := fmt.Sscanf(filepath.Base(path), owned, &owner)
			if err == nil && unix.Kill(owner, 0) == unix.ESRCH {
				_ = datapath.Remove(path) // the next run tries again
			}
		}
	}
})
