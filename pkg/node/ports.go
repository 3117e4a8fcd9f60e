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

// Where the kernel keeps the ports that it gives to sockets, and those among
// them that it does not.
const (
	ephemeralPath = "/proc/sys/net/ipv4/ip_local_port_range"
	reservedPath  = "/proc/sys/net/ipv4/ip_local_reserved_ports"
)

// PortRange is a range of ports, both ends included.
type PortRange struct{ Low, High uint16 }

// String returns the range as the kernel writes it.
func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.Low, r.High) }

// Len is how many ports there are.
func (r PortRange) Len() int { return int(r.High) - int(r.Low) + 1 }

// nodePorts are those that Kubernetes gives to Services by default.
var nodePorts = PortRange{30000, 32767}

// MasqueradePorts returns the two largest ranges of unprivileged ports of the calling
// thread's network namespace that are neither node ports nor handed out to
// sockets, the largest first: no connection of the node itself has one, unless it asked for
// it. There may be only one, or none. By default, both together are all such ports.
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

// readPorts reads one of the kernel's files of ports.
func readPorts(path string) ([]PortRange, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("ports: %w", err)
	}
	defer f.Close()
	text := make([]byte, 1<<16) // the kernel cuts what does not fit into the first read
	n, err := f.Read(text)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("ports: %w", err)
	}
	// The one file has ranges as "8080,9000-9100", the other as "32768 60999".
	ranges, err := parsePortRanges(strings.Join(strings.Fields(string(text[:n])), "-"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}

	return ranges, nil
}

// parsePortRanges reads "8080,9000-9100".
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

// without cuts holes into ranges.
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
