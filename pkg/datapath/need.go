package datapath

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/node"
)

// agentMemory is what the agent and its maps take beside the flow tables, in a cluster of 10,000 Services.
const agentMemory = 128 << 20

// Need returns how many bytes of memory an agent takes at its start, with flow tables of that size.
func Need(flowMemory uint64) uint64 { return flowMemory + agentMemory }

// NeededFiles is how many files an agent has open that has programs at hundreds of devices, and Services enough to fill
// the arrays of its maps. LeastFiles is what it has open in a small cluster, with room for requests.
const (
	NeededFiles = 4096
	LeastFiles  = 1024
)

// MaxFiles returns how many files this process may have open: Go raises the soft limit to the hard one.
func MaxFiles() (uint64, error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)

	return limit.Max, err
}

// explainLimit adds to an error of the kernel which limit it is, and what to do.
func explainLimit(err error) error {
	switch {
	case errors.Is(err, unix.ENOMEM):
		memory, errRead := node.ReadMemory()
		if errRead != nil {
			return errors.Join(err, errRead)
		}
		where, remedy := "this machine", "free memory"
		if memory.LimitedBy != "" {
			where = fmt.Sprintf("the limit of %d MiB (%s)", memory.Limit>>20, memory.LimitedBy)
			remedy = "raise it (resources.limits.memory of the chart)"
		}

		return fmt.Errorf("%w: %s leaves %d MiB for maps and programs: %s, or set a smaller --flow-table-memory", err, where, memory.Free>>20, remedy)
	case errors.Is(err, unix.EMFILE):
		files, errRead := MaxFiles()
		if errRead != nil {
			return errors.Join(err, errRead)
		}

		return fmt.Errorf("%w: this process may have %d files open: raise the limit (LimitNOFILE of the container runtime, ulimit -Hn) to %d", err, files, NeededFiles)
	}

	return err
}
