package node

import (
	"os"
	"strings"

	"github.com/sluice-lb/sluice/pkg/lb"
)

// Families returns the address families that the kernel supports in the calling
// thread's network namespace. IPv6 may be missing or switched off.
func Families() []lb.Family {
	if _, err := os.Stat("/proc/thread-self/net/if_inet6"); err != nil {
		return []lb.Family{lb.IPv4}
	}
	disabled, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6")
	if err == nil && strings.TrimSpace(string(disabled)) == "1" {
		return []lb.Family{lb.IPv4}
	}

	return []lb.Family{lb.IPv4, lb.IPv6}
}
