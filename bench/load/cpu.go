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
	User    time.Duration // with nice
	System  time.Duration // system calls, with what they do in the network stack
	SoftIRQ time.Duration
	IRQ     time.Duration
	Steal   time.Duration // taken by the hypervisor
	Idle    time.Duration // with iowait
}

// Busy is all but idle and stolen time.
func (c CPU) Busy() time.Duration { return c.User + c.System + c.SoftIRQ + c.IRQ }

// Sub returns the time between an earlier reading and c.
func (c CPU) Sub(earlier CPU) CPU {
	return CPU{
		User:    c.User - earlier.User,
		System:  c.System - earlier.System,
		SoftIRQ: c.SoftIRQ - earlier.SoftIRQ,
		IRQ:     c.IRQ - earlier.IRQ,
		Steal:   c.Steal - earlier.Steal,
		Idle:    c.Idle - earlier.Idle,
	}
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
		User: duration(t.User + t.Nice), System: duration(t.System), SoftIRQ: duration(t.SoftIRQ), IRQ: duration(t.IRQ),
		Steal: duration(t.Steal), Idle: duration(t.Idle + t.Iowait),
	}
}
