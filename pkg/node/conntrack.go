package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Conntrack is how the kernel's own connection tracking is to be set. Sluice does
// not need it; others on the node may, and count on what kube-proxy set. What is
// zero stays as it is.
type Conntrack struct {
	MaxPerCore, Min            int // see [ConntrackMax]
	TCPEstablished             time.Duration
	TCPCloseWait               time.Duration
	TCPBeLiberal               bool
	UDPUnanswered, UDPAnswered time.Duration
}

// ErrNoConntrack: the kernel tracks no connections in this network namespace.
var ErrNoConntrack = errors.New("the kernel does not track connections here")

// mostConnections is the most that a number of cores makes of it.
const mostConnections = 1 << 20

// ConntrackMax returns how many connections the kernel is to track: perCore for
// each core, at least least, and not more than fit into a few hundred MiB. It is
// zero, which leaves the kernel what it has, if perCore is.
func ConntrackMax(perCore, least, cores int) int {
	switch scaled := perCore * cores; {
	case scaled == 0:
		return 0
	case scaled > mostConnections:
		return mostConnections
	default:
		return max(scaled, least)
	}
}

// Set sets what is not so already, in the calling thread's network namespace,
// and returns it, as "nf_conntrack_max=131072". It goes on after an error, and
// returns all of them; it is [ErrNoConntrack] if there is nothing to set. Only
// the first network namespace of a machine can change nf_conntrack_max.
func (c Conntrack) Set() (set []string, err error) { return c.setBelow("/") }

func (c Conntrack) setBelow(root string) (set []string, err error) {
	w := sysctlWriter{dir: filepath.Join(root, "proc/sys/net/netfilter")}
	if _, err := os.Stat(filepath.Join(w.dir, conntrackMax)); errors.Is(err, os.ErrNotExist) {
		return nil, ErrNoConntrack
	}
	if most := ConntrackMax(c.MaxPerCore, c.Min, cores(root)); most > 0 && w.set(conntrackMax, most) {
		w.grow(filepath.Join(root, "sys/module/nf_conntrack/parameters/hashsize"), most/4)
	}
	w.setSeconds("nf_conntrack_tcp_timeout_established", c.TCPEstablished)
	w.setSeconds("nf_conntrack_tcp_timeout_close_wait", c.TCPCloseWait)
	w.setSeconds("nf_conntrack_udp_timeout", c.UDPUnanswered)
	w.setSeconds("nf_conntrack_udp_timeout_stream", c.UDPAnswered)
	if c.TCPBeLiberal {
		w.set("nf_conntrack_tcp_be_liberal", 1)
	}

	return w.changed, errors.Join(w.errs...)
}

const conntrackMax = "nf_conntrack_max"

// sysctlWriter writes numbers into files of the kernel.
type sysctlWriter struct {
	dir     string
	changed []string
	errs    []error
}

// set makes the number in the file of that name value, and says whether it is.
func (w *sysctlWriter) set(name string, value int) bool {
	return w.setAt(filepath.Join(w.dir, name), value)
}

func (w *sysctlWriter) setAt(path string, value int) bool {
	name := filepath.Base(path)
	now, err := readNumber(path)
	if err == nil && now == value {
		return true
	}
	if err == nil {
		err = os.WriteFile(path, []byte(strconv.Itoa(value)), 0)
	}
	if err != nil {
		w.errs = append(w.errs, fmt.Errorf("%s=%d: %w", name, value, err))

		return false
	}
	w.changed = append(w.changed, fmt.Sprintf("%s=%d", name, value))

	return true
}

func (w *sysctlWriter) setSeconds(name string, d time.Duration) {
	if d > 0 {
		w.set(name, int(d/time.Second))
	}
}

// grow makes the number in a file value if it is less.
func (w *sysctlWriter) grow(path string, value int) {
	now, err := readNumber(path)
	if err != nil {
		w.errs = append(w.errs, fmt.Errorf("size of the table of connections: %w", err))

		return
	}
	if now < value {
		w.setAt(path, value)
	}
}

func readNumber(path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}

	return strconv.Atoi(strings.TrimSpace(string(text)))
}

// Cores returns how many the machine has, also if this process may not use them all.
func Cores() int { return cores("/") }

// cores is how many the machine has, also if this process may not use them all.
func cores(root string) int {
	text, err := os.ReadFile(filepath.Join(root, "sys/devices/system/cpu/online"))
	if err != nil {
		return runtime.NumCPU()
	}
	count := 0
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		first, last, isRange := strings.Cut(part, "-")
		low, err := strconv.Atoi(first)
		high := low
		if err == nil && isRange {
			high, err = strconv.Atoi(last)
		}
		if err != nil {
			return runtime.NumCPU()
		}
		count += high - low + 1
	}

	return count
}
