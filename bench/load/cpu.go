package load

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// CPU is what processors did, all of them together: the sum is time × processors.
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

// Sub is what was done between an earlier reading and c.
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

// ReadCPU reads what the machine's processors have done since it started.
func ReadCPU() (CPU, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return CPU{}, err
	}

	return parseCPU(string(text))
}

// /proc/stat counts ticks of this length, on amd64 and on arm64.
const tick = 10 * time.Millisecond

// parseCPU reads the first line of /proc/stat.
func parseCPU(text string) (CPU, error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return CPU{}, fmt.Errorf("/proc/stat: %.80q", line)
	}
	var times [8]time.Duration // user nice system idle iowait irq softirq steal
	for i := range times {
		ticks, err := strconv.ParseInt(fields[i+1], 10, 64)
		if err != nil {
			return CPU{}, fmt.Errorf("/proc/stat: %w", err)
		}
		times[i] = time.Duration(ticks) * tick
	}

	return CPU{
		User:    times[0] + times[1],
		System:  times[2],
		Idle:    times[3] + times[4],
		IRQ:     times[5],
		SoftIRQ: times[6],
		Steal:   times[7],
	}, nil
}
