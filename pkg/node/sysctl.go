package node

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/bpf"
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
	dir := filepath.Join(root, "proc/sys/net/netfilter")
	if _, err := os.Stat(filepath.Join(dir, conntrackMax)); errors.Is(err, os.ErrNotExist) {
		return nil, ErrNoConntrack
	}
	var errs []error
	// write writes the value into a file, if it has another, and reports whether the file has it.
	write := func(path string, value int) bool {
		name := filepath.Base(path)
		now, err := ReadNumber(path)
		if err == nil && now == value {
			return true
		}
		if err == nil {
			err = os.WriteFile(path, []byte(strconv.Itoa(value)), 0)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s=%d: %w", name, value, err))

			return false
		}
		set = append(set, fmt.Sprintf("%s=%d", name, value))

		return true
	}

	most := ConntrackMax(c.MaxPerCore, c.Min, cores(root))
	if most > 0 && write(filepath.Join(dir, conntrackMax), most) {
		table := filepath.Join(root, "sys/module/nf_conntrack/parameters/hashsize")
		size, err := ReadNumber(table)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("size of the table of connections: %w", err))
		case size < most/4: // it is not made smaller
			write(table, most/4)
		}
	}
	for _, timeout := range []struct {
		name  string
		value time.Duration
	}{
		{"nf_conntrack_tcp_timeout_established", c.TCPEstablished},
		{"nf_conntrack_tcp_timeout_close_wait", c.TCPCloseWait},
		{"nf_conntrack_udp_timeout", c.UDPUnanswered},
		{"nf_conntrack_udp_timeout_stream", c.UDPAnswered},
	} {
		if timeout.value > 0 {
			write(filepath.Join(dir, timeout.name), int(timeout.value/time.Second))
		}
	}
	if c.TCPBeLiberal {
		write(filepath.Join(dir, "nf_conntrack_tcp_be_liberal"), 1)
	}

	return set, errors.Join(errs...)
}

const conntrackMax = "nf_conntrack_max"

// ReadNumber returns the number that a file of /proc/sys has.
func ReadNumber(path string) (int, error) {
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
		number, err := ReadNumber("/proc/sys/net/ipv4/" + name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return limit, fmt.Errorf("limit of ICMP errors: %s: %w", name, err)
		}
		*value = uint32(number)
	}

	return limit, nil
}

// The kernel's files with the range of ephemeral ports, with the reserved ports in it, which it
// does not hand out, and with the first port that any process may bind to.
const (
	ephemeralPath    = "/proc/sys/net/ipv4/ip_local_port_range"
	reservedPath     = "/proc/sys/net/ipv4/ip_local_reserved_ports"
	unprivilegedPath = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
)

// NodePorts is Kubernetes' default range of node ports.
var NodePorts = bpf.PortRange{Low: 30000, High: 32767}

// EnoughMasqueradePorts is how many ports are enough for connections at a time to one port of a
// backend on another node.
const EnoughMasqueradePorts = 4096

// MasqueradePorts are the source ports of masqueraded flows.
type MasqueradePorts struct {
	Ranges []bpf.PortRange // one or two, the largest first
	// Ephemeral is set if sockets of the node that bind to no port get some of these, too.
	Ephemeral bool
	// Reserved is set if some of these are in ip_local_reserved_ports.
	Reserved bool
}

// Len returns the number of ports.
func (p MasqueradePorts) Len() int {
	total := 0
	for _, r := range p.Ranges {
		total += r.Len()
	}

	return total
}

// String returns the ranges, as "1024-29999 and 61000-65535 (33512 ports)".
func (p MasqueradePorts) String() string {
	texts := make([]string, len(p.Ranges))
	for i, r := range p.Ranges {
		texts[i] = r.String()
	}

	return fmt.Sprintf("%s (%d ports)", strings.Join(texts, " and "), p.Len())
}

// Problem returns what of the ports is not as it should be, and what an operator can do about it;
// both are "" if all is well.
func (p MasqueradePorts) Problem() (problem, remedy string) {
	switch {
	case p.Len() < EnoughMasqueradePorts:
		return fmt.Sprintf("there are %d ports to masquerade with: so many connections at a time can go to one port of a backend on another node", p.Len()),
			"Set net.ipv4.ip_unprivileged_port_start to its default, 1024, or less."
	case p.Reserved:
		return "connections are masqueraded with ports that are reserved, because too few others are left",
			"Narrow net.ipv4.ip_local_port_range to its default, 32768-60999, or reserve fewer ports in net.ipv4.ip_local_reserved_ports."
	case p.Ephemeral:
		return "connections are masqueraded with ports that sockets of the node get as well, because too few others are left: an answer " +
				"that a UDP socket of the node awaits without being connected may be taken for that to a masqueraded client",
			"Narrow net.ipv4.ip_local_port_range to its default, 32768-60999."
	default:
		return "", ""
	}
}

// ReadMasqueradePorts returns the ports of the calling thread's network namespace with which flows
// are masqueraded: the two largest ranges of unprivileged ports that are neither node ports,
// ephemeral ports nor reserved, because a connection of the node itself has such a port only if it
// binds to it. If these are not enough, ephemeral ports are among them, and then reserved ports: a
// flow takes no port with which another connection of the node has its tuple.
func ReadMasqueradePorts() (MasqueradePorts, error) {
	ephemeral, err := readPorts(ephemeralPath)
	if err != nil {
		return MasqueradePorts{}, err
	}
	reserved, err := readPorts(reservedPath)
	if err != nil {
		return MasqueradePorts{}, err
	}
	first, err := ReadNumber(unprivilegedPath)
	if err != nil {
		return MasqueradePorts{}, fmt.Errorf("first unprivileged port: %w", err)
	}
	all := without([]bpf.PortRange{{Low: uint16(max(first, 1024)), High: 65535}}, []bpf.PortRange{NodePorts})
	var ports MasqueradePorts
	for _, avoided := range [][]bpf.PortRange{slices.Concat(ephemeral, reserved), reserved, nil} {
		gaps := without(all, avoided)
		slices.SortStableFunc(gaps, func(a, b bpf.PortRange) int { return cmp.Compare(b.Len(), a.Len()) })
		ports.Ranges = gaps[:min(len(gaps), 2)]
		if ports.Len() >= EnoughMasqueradePorts {
			break
		}
	}
	ports.Ephemeral = overlap(ports.Ranges, without(ephemeral, reserved))
	ports.Reserved = overlap(ports.Ranges, reserved)

	return ports, nil
}

// EphemeralPorts returns the ports that the kernel gives to sockets of the calling thread's network
// namespace which bind to none.
func EphemeralPorts() ([]bpf.PortRange, error) {
	ephemeral, err := readPorts(ephemeralPath)
	if err != nil {
		return nil, err
	}
	reserved, err := readPorts(reservedPath)

	return without(ephemeral, reserved), err
}

// readPorts reads a file of the kernel with ports.
func readPorts(path string) ([]bpf.PortRange, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("ports: %w", err)
	}
	defer f.Close()
	text := make([]byte, 1<<16) // the kernel returns only what fits into the first read
	n, err := f.Read(text)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("ports: %w", err)
	}
	// One file has "8080,9000-9100", the other "32768 60999".
	ranges, err := parsePortRanges(strings.Join(strings.Fields(string(text[:n])), "-"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	return ranges, nil
}

// parsePortRanges parses "8080,9000-9100".
func parsePortRanges(text string) ([]bpf.PortRange, error) {
	var ranges []bpf.PortRange
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		from, err := strconv.ParseUint(low, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("ports %q: %w", part, err)
		}
		to, err := strconv.ParseUint(high, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("ports %q: %w", part, err)
		}
		ranges = append(ranges, bpf.PortRange{Low: uint16(from), High: uint16(to)})
	}

	return ranges, nil
}

// without returns the ranges without the ports in holes.
func without(ranges, holes []bpf.PortRange) []bpf.PortRange {
	for _, hole := range holes {
		var rest []bpf.PortRange
		for _, r := range ranges {
			if hole.Low > r.Low {
				rest = append(rest, bpf.PortRange{Low: r.Low, High: min(r.High, hole.Low-1)})
			}
			if hole.High < r.High {
				rest = append(rest, bpf.PortRange{Low: max(r.Low, hole.High+1), High: r.High})
			}
		}
		ranges = rest
	}

	return ranges
}

// overlap reports whether a port is in ranges of both.
func overlap(a, b []bpf.PortRange) bool {
	return slices.ContainsFunc(a, func(x bpf.PortRange) bool {
		return slices.ContainsFunc(b, func(y bpf.PortRange) bool { return x.Low <= y.High && y.Low <= x.High })
	})
}
