package report

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine is what a run was made on.
type Machine struct {
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"` // model
	Cores      int    `json:"cores"`
	Memory     int64  `json:"memory"`               // bytes
	Hypervisor bool   `json:"hypervisor,omitempty"` // it is a virtual machine
	Go         string `json:"go"`                   // version
}

// ReadMachine looks at this machine.
func ReadMachine() (Machine, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return Machine{}, fmt.Errorf("name of the kernel: %w", err)
	}
	var system unix.Sysinfo_t
	if err := unix.Sysinfo(&system); err != nil {
		return Machine{}, fmt.Errorf("size of the memory: %w", err)
	}
	processors, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return Machine{}, fmt.Errorf("model of the processor: %w", err)
	}

	return Machine{
		Kernel:     unix.ByteSliceToString(name.Release[:]),
		CPU:        fieldOf(string(processors), "model name"),
		Cores:      runtime.NumCPU(),
		Memory:     int64(system.Totalram) * int64(system.Unit),
		Hypervisor: strings.Contains(" "+fieldOf(string(processors), "flags")+" ", " hypervisor "),
		Go:         runtime.Version(),
	}, nil
}

// fieldOf returns the first value of a name in a file of "name : value" lines.
func fieldOf(text, name string) string {
	for line := range strings.Lines(text) {
		if field, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(field) == name {
			return strings.TrimSpace(value)
		}
	}

	return ""
}
