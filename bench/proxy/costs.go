package proxy

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/procfs"

	"github.com/sluice-lb/sluice/test/lab"
)

// Costs are the resources of a proxy.
type Costs struct {
	// CPU is the time on processors of its process and of all that it has started
	// (nft, iptables-restore), ended or not, without the kernel's own threads.
	CPU time.Duration
	// RSS is the resident memory of its process in bytes, and PeakRSS the most there
	// was. The processes that it starts are not in them.
	RSS, PeakRSS int64
}

// ReadCosts returns what a proxy has taken since its start.
func ReadCosts(p Proxy) (Costs, error) {
	cpu, err := ReadCPU(p.Cgroup())
	if err != nil {
		return Costs{}, err
	}
	process, err := procfs.NewProc(p.PID())
	if err != nil {
		return Costs{}, err
	}
	status, err := process.NewStatus()
	if err == nil && status.VmRSS == 0 {
		err = fmt.Errorf("process %d has ended", p.PID())
	}

	return Costs{CPU: cpu, RSS: int64(status.VmRSS), PeakRSS: int64(status.VmHWM)}, err
}

// ReadCPU returns the CPU time of all processes that have ever been in a cgroup.
func ReadCPU(cgroup *lab.Cgroup) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join(cgroup.Path(), "cpu.stat"))
	if err != nil {
		return 0, err
	}
	var microseconds time.Duration
	if _, err := fmt.Sscanf(string(text), "usage_usec %d", &microseconds); err != nil {
		return 0, fmt.Errorf("cpu.stat of cgroup: %w", err)
	}

	return microseconds * time.Microsecond, nil
}

// ReadKernelMemory returns how many bytes the kernel has now for tables of its own:
// small objects that it cannot give back, large areas, and what each processor has.
// The difference over the start of a proxy is its rules and maps, and other changes on
// the machine. The kernel frees the memory of ended processes late: see [StableKernelMemory].
func ReadKernelMemory() (int64, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return 0, err
	}
	memory, err := fs.Meminfo()
	if err != nil {
		return 0, err
	}
	if memory.SUnreclaimBytes == nil || memory.VmallocUsedBytes == nil || memory.PercpuBytes == nil {
		return 0, fmt.Errorf("/proc/meminfo lacks SUnreclaim, VmallocUsed or Percpu")
	}

	return int64(*memory.SUnreclaimBytes + *memory.VmallocUsedBytes + *memory.PercpuBytes), nil
}

// StableKernelMemory is [ReadKernelMemory] once that hardly changes any more, or after
// ten seconds: the kernel frees what a proxy had some time after its end.
func StableKernelMemory(ctx context.Context) (int64, error) {
	const (
		pause  = 500 * time.Millisecond
		hardly = 1 << 20
	)
	before, err := ReadKernelMemory()
	for deadline := time.Now().Add(10 * time.Second); err == nil; {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(pause):
		}
		var now int64
		now, err = ReadKernelMemory()
		if max(now-before, before-now) < hardly || time.Now().After(deadline) {
			return now, err
		}
		before = now
	}

	return 0, err
}
