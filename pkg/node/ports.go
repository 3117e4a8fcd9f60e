package node

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// The kernel's files with the range of ephemeral ports, and with the reserved ports
// in it, which it does not hand out.
const (
	ephemeralPath = "/proc/sys/net/ipv4/ip_local_port_range"
	reservedPath  = "/proc/sys/net/ipv4/ip_local_reserved_ports"
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ Low, High uint16 }

// String returns the range as the kernel writes it.
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.Low, r.High) }

// Len returns the number of ports.
func (r PortRange) Len() int { return int(r.High) - int(r.Low) + 1 }

// nodePorts is Kubernetes' default range of node ports.
var nodePorts = PortRange{30000, 32767}

// MasqueradePorts returns the two largest ranges of unprivileged ports of the calling
// thread's network namespace that are neither node ports nor ephemeral ports, the
// largest first: a connection of the node itself has such a port only if it binds to it.
// There may be only one range, or none. With the kernel's defaults, the two are all such ports.
func MasqueradePorts() ([]PortRange, error) {
	ephemeral, err := readPorts(ephemeralPath)
	if err != nil {
		return nil, err
	}
	reserved, err := readPorts(reservedPath)
	if err != nil {
		return nil, err
	}
	gaps := without([]PortRange{{1024, 65535}}, append(without(ephemeral, reserved), nodePorts))
	slices.SortStableFunc(gaps, func(a, b PortRange) int { return cmp.Compare(b.Len(), a.Len()) })

	return gaps[:min(len(gaps), 2)], nil
}

// readPorts reads a file of the kernel with ports.
func readPorts(path string) ([]PortRange, error) {
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
func parsePortRanges(text string) ([]PortRange, error) {
	var ranges []PortRange
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
		ranges = append(ranges, PortRange{uint16(from), uint16(to)})
	}

	return ranges, nil
}

// without returns the ranges without the ports in holes.
func without(ranges, holes []PortRange) []PortRange {
	for _, hole := range holes {
		var rest []PortRange
		for _, r := range ranges {
			if hole.Low > r.Low {
				rest = append(rest, PortRange{r.Low, min(r.High, hole.Low-1)})
			}
			if hole.High < r.High {
				rest = append(rest, PortRange{max(r.Low, hole.High+1), r.High})
			}
		}
		ranges = rest
	}

	return ranges
}
