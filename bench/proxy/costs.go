package proxy

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// Costs are what a proxy has taken so far. Without a process they are zero.
type Costs struct {
	// CPU is the time on processors of its process and of all that it has started
	// (nft, iptables-restore), ended or not. What the kernel does for it later, in
	// threads of its own, is not in it.
	CPU time.Duration
	// RSS is the resident memory of its process in bytes, and Anonymous that part
	// which is no file and no map. PeakRSS is the most there was. The processes
	// that it starts are not in them.
	RSS, Anonymous, PeakRSS int64
}

// Costs returns what the proxy has taken since its start.
func (p *Proxy) Costs() (Costs, error) {
	pid := p.program.pid()
	if pid == 0 {
		return Costs{}, nil
	}
	cpu, err := readCPU(p.program.cgroup())
	if err != nil {
		return Costs{}, fmt.Errorf("costs of %s: %w", p.cfg.Kind, err)
	}
	memory, err := readFields(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return Costs{}, fmt.Errorf("costs of %s: %w", p.cfg.Kind, err)
	}
	costs := Costs{CPU: cpu}
	for name, value := range map[string]*int64{"VmRSS": &costs.RSS, "RssAnon": &costs.Anonymous, "VmHWM": &costs.PeakRSS} {
		bytes, ok := memory[name]
		if !ok {
			return Costs{}, fmt.Errorf("costs of %s: process %d has no %s: it has ended", p.cfg.Kind, pid, name)
		}
		*value = bytes
	}

	return costs, nil
}

// readCPU returns what all processes that have ever been in a cgroup took there.
func readCPU(cgroup *lab.Cgroup) (time.Duration, error) {
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
// The difference over the start of a proxy is its rules and maps, and whatever else
// happened on the machine. The kernel frees the memory of ended processes late: see [StableKernelMemory].
func ReadKernelMemory() (int64, error) {
	memory, err := readFields("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	var sum int64
	for _, name := range []string{"SUnreclaim", "VmallocUsed", "Percpu"} {
		bytes, ok := memory[name]
		if !ok {
			return 0, fmt.Errorf("/proc/meminfo has no %s", name)
		}
		sum += bytes
	}

	return sum, nil
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

// readFields reads a file of lines like "VmRSS:  12 kB", in bytes. Other lines are
// left out.
func readFields(path string) (map[string]int64, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	fields := make(map[string]int64)
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ":")
		var kilobytes int64
		var unit string
		if _, err := fmt.Sscan(value, &kilobytes, &unit); err == nil && unit == "kB" {
			fields[name] = kilobytes << 10
		}
	}

	return fields, lines.Err()
}
