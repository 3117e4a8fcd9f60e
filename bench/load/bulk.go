package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-lb/sluice/test/lab"
)

// ServeBulk starts iperf3's server in a namespace, TCP and UDP, on the wildcard
// address, and returns when it listens. It serves one client at a time. The caller
// closes it, and does nothing else with it.
func ServeBulk(ns *lab.Namespace, port uint16) (*Server, error) {
	p, err := startProcess(ns, nil, exec.Command("iperf3", "--server", "--forceflush", "--port", strconv.Itoa(int(port))))
	if err != nil {
		return nil, err
	}
	output := bufio.NewScanner(p.stdout)
	for output.Scan() {
		if strings.Contains(output.Text(), "listening") {
			go func() { _, _ = io.Copy(io.Discard, p.stdout) }()

			return &Server{process: p}, nil
		}
	}
	err = errors.Join(output.Err(), p.wait(), p.close())

	return nil, fmt.Errorf("serve bulk on port %d: %w", port, err)
}

// Throughput is the result of sending as much as possible.
type Throughput struct {
	// BitsPerSecond are those of the payload that was received.
	BitsPerSecond float64
	// PacketsPerSecond are the datagrams that were received. UDP only.
	PacketsPerSecond float64

	Elapsed time.Duration
	// Machine is the time of all processors of the machine from the start of the
	// client to its end, some milliseconds more than Elapsed.
	Machine CPU
}

// busyTimeout is how long Bulk waits for a server that is still busy with the previous
// client.
const busyTimeout = 5 * time.Second

// Bulk runs iperf3's client in a namespace and a cgroup, each of which may be nil,
// with arguments of its own: "--time", "5"; with "--udp", "--bitrate", "0",
// "--length", "64" it sends as many small datagrams as it can. The error is the
// client's. The end of the context ends it; then the error wraps the context's
// cause.
func Bulk(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, target netip.AddrPort, args ...string) (Throughput, error) {
	for deadline := time.Now().Add(busyTimeout); ; {
		t, err := bulk(ctx, ns, cg, target, args)
		if !errors.Is(err, errServerBusy) || time.Now().After(deadline) {
			return t, err
		}
		pause(10 * time.Millisecond)
	}
}

var errServerBusy = errors.New("the server is busy")

func bulk(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, target netip.AddrPort, args []string) (Throughput, error) {
	before, err := ReadCPU()
	if err != nil {
		return Throughput{}, err
	}
	args = append([]string{
		"--client", target.Addr().String(), "--port", strconv.Itoa(int(target.Port())),
		"--connect-timeout", strconv.Itoa(int(busyTimeout.Milliseconds())), "--json",
	}, args...)
	p, err := startProcess(ns, cg, exec.Command("iperf3", args...))
	if err != nil {
		return Throughput{}, err
	}
	defer p.close()
	defer context.AfterFunc(ctx, func() { _ = p.kill() })()
	text, err := io.ReadAll(p.stdout)
	err = errors.Join(err, p.wait())
	if ctx.Err() != nil {
		return Throughput{}, fmt.Errorf("bulk to %v: %w", target, context.Cause(ctx))
	}
	after, notRead := ReadCPU()
	t, reported := parseReport(text)
	if err := errors.Join(reported, err, notRead); err != nil {
		return Throughput{}, fmt.Errorf("bulk to %v: %w", target, err)
	}
	t.Machine = after.Sub(before)

	return t, nil
}

// parseReport reads iperf3's report, which has an error in it if it has nothing
// else.
func parseReport(text []byte) (Throughput, error) {
	var r struct {
		Error string
		End   *struct {
			Received struct { // of all streams together
				Seconds       float64
				BitsPerSecond float64 `json:"bits_per_second"`
				Packets       float64 // sent
				LostPackets   float64 `json:"lost_packets"`
			} `json:"sum_received"`
		}
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return Throughput{}, fmt.Errorf("report of iperf3: %w: %.200q", err, text)
	}
	switch {
	case strings.Contains(r.Error, "busy"):
		return Throughput{}, errServerBusy
	case r.Error != "":
		return Throughput{}, errors.New("iperf3: " + r.Error)
	case r.End == nil || r.End.Received.Seconds == 0:
		return Throughput{}, fmt.Errorf("report of iperf3 has no end: %.200q", text)
	}
	received := r.End.Received
	t := Throughput{
		BitsPerSecond: received.BitsPerSecond,
		Elapsed:       time.Duration(received.Seconds * float64(time.Second)),
	}
	if received.Packets > 0 {
		t.PacketsPerSecond = (received.Packets - received.LostPackets) / received.Seconds
	}

	return t, nil
}
