package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
)

// ICMPLimit is the rate limit of ICMP errors that a node sends to all hosts together.
type ICMPLimit struct {
	PerSecond uint32 // 0: no limit
	Burst     uint32
}

// defaultICMPLimit is the kernel's default.
var defaultICMPLimit = ICMPLimit{PerSecond: 1000, Burst: 50}

// ReadICMPLimit returns the limit of the calling thread's network namespace, or the
// kernel's default if it cannot be read there: older kernels have the sysctls only in
// the initial namespace.
func ReadICMPLimit() (ICMPLimit, error) {
	limit := defaultICMPLimit
	for name, value := range map[string]*uint32{"icmp_msgs_per_sec": &limit.PerSecond, "icmp_msgs_burst": &limit.Burst} {
		text, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return limit, fmt.Errorf("limit of ICMP errors: %w", err)
		}
		number, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 31)
		if err != nil {
			return limit, fmt.Errorf("limit of ICMP errors: %s: %w", name, err)
		}
		*value = uint32(number)
	}

	return limit, nil
}
