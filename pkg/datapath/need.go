package datapath

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/node"
)

// agentMemory is what the agent and its maps take beside the flow tables, in a cluster of 10,000 Services.
const agentMemory = 128 << 20

// Need returns how many bytes of memory an agent takes at its start, with flow tables of that size.
func Need(flowMemory uint64) uint64 { return flowMemory + agentMemory }

// NeededFiles is how many files an agent has open that has programs at hundreds of devices, and 100,000 Services of
// the usual kind: each chunk of an array is one. A thousand pools that hash, of which each takes a chunk of slots, add a
// thousand. LeastFiles is what it has open in a small cluster, with room for requests.
const (
	NeededFiles = 8192
	LeastFiles  = 1024
)

// MaxFiles returns how many files this process may have open: Go raises the soft limit to the hard one.
func MaxFiles() (uint64, error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)

	return limit.Max, err
}

// Files are the files that this process has open, which maps, programs and sockets are, too.
type Files struct {
	Open  uint64 `json:"open"`
	Limit uint64 `json:"limit"`
}

// ReadFiles returns how many files this process has open, all that it may have if there is no other left to find out.
func ReadFiles() (Files, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return Files{}, fmt.Errorf("limit of open files: %w", err)
	}
	open, err := os.ReadDir("/proc/self/fd")
	if errors.Is(err, unix.EMFILE) {
		return Files{limit.Cur, limit.Cur}, nil
	}
	if err != nil {
		return Files{}, fmt.Errorf("open files: %w", err)
	}

	return Files{uint64(len(open) - 1), limit.Cur}, nil // one was that folder
}

// Trouble returns what is wrong if few are left, and "" otherwise.
func (f Files) Trouble() string {
	if f.Open < f.Limit-f.Limit/10 || f.Limit == 0 {
		return ""
	}

	return fmt.Sprintf("the agent has %d files open of %d that it may: new Services, devices and requests fail without one: "+
		"raise the limit (LimitNOFILE of the container runtime, ulimit -Hn) to %d", f.Open, f.Limit, NeededFiles)
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
