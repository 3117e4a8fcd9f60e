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

// Conntrack is the configuration of the kernel's connection tracking. Sluice does not
// use it; other programs on the node may rely on the values that kube-proxy sets.
// Fields that are zero leave the kernel's value.
type Conntrack struct {
	MaxPerCore, Min            int // see [ConntrackMax]
	TCPEstablished             time.Duration
	TCPCloseWait               time.Duration
	TCPBeLiberal               bool
	UDPUnanswered, UDPAnswered time.Duration
}

// ErrNoConntrack is returned if the kernel does not track connections in this network namespace.
var ErrNoConntrack = errors.New("the kernel does not track connections here")

// mostConnections limits the product of cores and connections per core.
const mostConnections = 1 << 20

// ConntrackMax returns how many connections the kernel may track: perCore for each
// core, but at least least, and not more than fit into a few hundred MiB. It returns
// 0, which leaves the kernel's value, if perCore is 0.
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

// Set sets the sysctls that differ, in the calling thread's network namespace, and
// returns them, as "nf_conntrack_max=131072". It continues after an error, and
// returns all errors; [ErrNoConntrack] if the kernel has no such sysctls. Only in
// the initial network namespace can nf_conntrack_max be changed.
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

// sysctlWriter writes numbers into the kernel's files.
type sysctlWriter struct {
	dir     string
	changed []string
	errs    []error
}

// set writes the value into the file of that name, if it has another, and reports
// whether the file has the value.
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

// grow writes the value into a file, if it has a smaller one.
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

// Cores returns the number of online CPUs of the machine, including those that this
// process may not use.
func Cores() int { return cores("/") }

// cores returns [Cores], from the files below root.
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
