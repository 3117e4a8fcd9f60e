package load

import (
	"math"
	"time"

	"github.com/prometheus/procfs"
)

// CPU is the time of all processors together: the sum is time × processors.
// The kernel counts in ticks of 10 ms, so that of a window of a second on two
// processors a percent is two ticks.
type CPU struct {
	Busy    time.Duration // all but idle and stolen time, soft interrupts among it
	SoftIRQ time.Duration
	Steal   time.Duration // taken by the hypervisor
	Idle    time.Duration // with iowait
}

// Sub returns the time between an earlier reading and c.
func (c CPU) Sub(earlier CPU) CPU {
	return CPU{c.Busy - earlier.Busy, c.SoftIRQ - earlier.SoftIRQ, c.Steal - earlier.Steal, c.Idle - earlier.Idle}
}

// ReadCPU returns what the machine's processors have done since it started.
func ReadCPU() (CPU, error) {
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return CPU{}, err
	}
	stat, err := fs.Stat()
	if err != nil {
		return CPU{}, err
	}

	return cpuOf(stat.CPUTotal), nil
}

// cpuOf converts seconds, of which procfs has ticks of 10 ms.
func cpuOf(t procfs.CPUStat) CPU {
	duration := func(seconds float64) time.Duration {
		return time.Duration(math.Round(seconds*100)) * 10 * time.Millisecond
	}

	return CPU{
		Busy:    duration(t.User + t.Nice + t.System + t.SoftIRQ + t.IRQ),
		SoftIRQ: duration(t.SoftIRQ), Steal: duration(t.Steal), Idle: duration(t.Idle + t.Iowait),
	}
}
