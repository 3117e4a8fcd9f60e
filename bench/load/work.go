package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/sluice-lb/sluice/test/lab"
)

// Kind is the kind of exchange that a client makes.
type Kind string

const (
	// Connect makes a TCP connection, exchanges a request and its response on it,
	// and closes it. Only the connect call is on the clock.
	Connect Kind = "connect"
	// Exchange exchanges a request and its response on a TCP connection that stays
	// open. Each client has one; it makes it anew after a failure.
	Exchange Kind = "exchange"
	// UDPConnected does so on a connected UDP socket of the client.
	UDPConnected Kind = "udp-connected"
	// UDPUnconnected does so on a UDP socket of the client that is not connected:
	// each datagram has its own destination.
	UDPUnconnected Kind = "udp-unconnected"
	// UDPNew does so on a new connected UDP socket each time, as a resolver asks.
	UDPNew Kind = "udp-new"
)

// Closing is how a connection that a client makes for one exchange ends.
type Closing string

const (
	// ClientCloses is the default: the client sends the first FIN, when it has its answer.
	ClientCloses Closing = ""
	// ServerCloses has the server send the first FIN, right after its answer. Its side
	// keeps the connection's last state (TIME_WAIT).
	ServerCloses Closing = "server"
	// ClientResets ends the connection with an RST of the client, when it has its answer.
	ClientResets Closing = "reset"
)

// Work is the task of a load generator.
type Work struct {
	Kind Kind

	// Closing is used by [Connect] only.
	Closing Closing

	// Sources are addresses that [Connect] dials from in turn, all of the namespace's own. None: the
	// kernel chooses.
	Sources []netip.Addr

	// Targets are taken in turn, IPv4 as all here; client c begins at target c. A client that keeps
	// its connection keeps its first target.
	Targets []netip.AddrPort

	// Clients is how many there are, each a thread.
	Clients int

	// Rate is how many exchanges are due per second, all clients together, at even
	// distances; an exchange that is due while its client is busy is late, and its clock runs. 0:
	// a closed loop, each client as fast as it can.
	Rate int

	// Pause is how long a client of a closed loop waits between two exchanges.
	Pause time.Duration

	// WarmUp comes before Duration, and counts for nothing.
	WarmUp, Duration time.Duration
}

// maxClients bounds the threads: the runtime looks at each a hundred times a second.
const maxClients = 256

// validate returns an error that describes what is wrong with the work.
func (w Work) validate() error {
	if !slices.Contains([]Kind{Connect, Exchange, UDPConnected, UDPUnconnected, UDPNew}, w.Kind) {
		return fmt.Errorf("work: unknown kind %q", w.Kind)
	}
	if len(w.Targets) == 0 {
		return fmt.Errorf("work: no targets")
	}
	for _, target := range w.Targets {
		if !target.Addr().Is4() || target.Port() == 0 {
			return fmt.Errorf("work: target %v: want an IPv4 address and a port", target)
		}
	}
	if w.Kind != Connect && (w.Closing != ClientCloses || len(w.Sources) > 0) {
		return fmt.Errorf("work: closing %q, %d sources: only for %s", w.Closing, len(w.Sources), Connect)
	}
	if w.Clients < 1 || w.Clients > maxClients {
		return fmt.Errorf("work: %d clients: want 1 to %d", w.Clients, maxClients)
	}
	if w.Rate < 0 || w.Pause < 0 || w.WarmUp < 0 || w.Duration <= 0 || w.Rate > 0 && w.Pause > 0 {
		return fmt.Errorf("work: rate %d, pause %v, warm-up %v, duration %v: want none negative, a duration, and not both of the first",
			w.Rate, w.Pause, w.WarmUp, w.Duration)
	}

	return nil
}

// Result is the result of a [Work]. Only the measured window is
// counted: exchanges that began in it, or, with a rate, that were due in it.
type Result struct {
	// Started is Succeeded and Failed together.
	Started, Succeeded int

	// Failed are those without the right answer, also for having none within a
	// second; and, with a rate, those that had not begun a second after the window
	// because the clients were that far behind.
	Failed int

	// FirstError is one of the first failures, "" if there was none.
	FirstError string

	// Elapsed is the work's duration, and when clients were behind at its end, also
	// the time until the last of its exchanges began.
	Elapsed time.Duration

	// Latencies are those of the exchanges that succeeded: of the connect call for
	// [Connect], of the whole exchange otherwise. With a rate they count from the
	// moment at which the exchange was due.
	Latencies Latencies

	// Lateness is, with a rate, how long after it was due each of them began. It is
	// a part of their latencies: the time that a client was busy with those
	// before, and what the kernel takes to wake a thread.
	Lateness Latencies

	// Silence is how long nothing succeeded: slots of 100 ms, from the beginning of the
	// window, in which no exchange came to its end. Quantiles do not show that: clients of
	// a closed loop that wait make no exchange.
	Silence time.Duration

	// Machine is the time of all processors of the machine during the work's duration.
	Machine CPU
}

// PerSecond is the rate of those that succeeded.
func (r *Result) PerSecond() float64 { return float64(r.Succeeded) / r.Elapsed.Seconds() }

// Latencies counts durations with three significant digits.
type Latencies struct{ *hdrhistogram.Histogram }

func newLatencies() Latencies { return Latencies{hdrhistogram.New(1, int64(time.Hour), 3)} }

// add counts a duration; those above an hour as an hour.
func (l Latencies) add(d time.Duration) { _ = l.RecordValue(min(int64(d), l.HighestTrackableValue())) }

// Quantile returns the latency at the rank nearest to a part q of all, q from 0 to 1. It is
// 0 if there is none.
func (l Latencies) Quantile(q float64) time.Duration {
	if l.Histogram == nil {
		return 0
	}

	return time.Duration(l.ValueAtPercentile(100 * q))
}

// Count returns how many there are.
func (l Latencies) Count() int { return int(l.TotalCount()) }

// Over returns how many are longer than a limit.
func (l Latencies) Over(limit time.Duration) int {
	var longer int64
	for _, bar := range l.Distribution() {
		if bar.From > int64(limit) {
			longer += bar.Count
		}
	}

	return int(longer)
}

// GobEncode implements [gob.GobEncoder].
func (l Latencies) GobEncode() ([]byte, error) {
	return l.Encode(hdrhistogram.V2CompressedEncodingCookieBase)
}

// GobDecode implements [gob.GobDecoder].
func (l *Latencies) GobDecode(text []byte) (err error) {
	l.Histogram, err = hdrhistogram.Decode(text)

	return err
}

// Run does the work in a process in a namespace and a cgroup, in both from its
// birth; each may be nil: then it is that of the calling process. It returns when
// the process has ended. The end of the context ends the process; then, the error
// wraps the context's cause. That exchanges fail is a result, no error.
//
// In the namespace it makes all ports from 1024 usable for clients, and those of
// connections closed more than a second ago usable again: without that, a target
// gets 28,000 connections a minute.
func Run(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, w Work) (Result, error) {
	if err := w.validate(); err != nil {
		return Result{}, err
	}
	var result Result
	// The clients, the goroutine that waits for the end of the window, and the one that reads stdin.
	if err := runRole(ctx, ns, cg, "generator", w.Clients+2, w, &result); err != nil {
		return Result{}, fmt.Errorf("run load: %w", err)
	}

	return result, nil
}

// widenPorts makes many connections to one target possible. The calling process'
// own namespace stays as it is.
func widenPorts(ns *lab.Namespace) error {
	if ns == nil {
		return nil
	}

	return errors.Join(
		ns.Sysctl("net/ipv4/ip_local_port_range", "1024 65535"),
		ns.Sysctl("net/ipv4/tcp_tw_reuse", "1"),
	)
}
