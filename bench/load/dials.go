package load

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Dials are connections to one address at a fixed rate, however many of them are still waiting
// for an answer: those that a dead backend does not answer delay no other. Each has a socket of
// its own, asks a [lab.Server] one question, and is closed by the client.
//
// It is Go's package net that makes them, not the system calls of [Work]: what waits for seconds
// would need thousands of threads. So a latency has some ten microseconds more.
type Dials struct {
	Network string         // tcp or udp
	Target  netip.AddrPort // leads to a lab.Server

	// Sources are addresses to dial from in turn, all of the namespace's own. None: the
	// kernel chooses.
	Sources []netip.Addr

	Rate     int // a second
	Duration time.Duration

	// Timeout is how long a TCP connection may take; 0: as long as the kernel tries. A datagram
	// is sent again each second, by the same socket, until there is an answer or the timeout is
	// over.
	Timeout time.Duration
}

// Dial is one of them.
type Dial struct {
	// Began is when it was made, by the kernel's CLOCK_MONOTONIC, see [Clock].
	Began time.Duration
	// Took is how long connect took, or, for UDP, all until the answer; if it failed, how
	// long that took.
	Took time.Duration
	// Connected is whether connect succeeded; it always does for UDP, and is false there.
	Connected bool
	// Backend is where the question arrived, zero if it failed.
	Backend netip.Addr
	// Failed is why it failed, "" if it did not.
	Failed string
}

// answerTimeout is how long the server of an open connection may take to answer.
const answerTimeout = 5 * time.Second

// repeatAfter is when a datagram without an answer is sent again, as resolvers do.
const repeatAfter = time.Second

// Clock returns the kernel's CLOCK_MONOTONIC, which all processes share.
func Clock() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it cannot fail

	return time.Duration(t.Nano())
}

// Run makes the connections in a process in a namespace and a cgroup, in both from its birth;
// each may be nil: then it is that of the calling process. It returns when all have ended, with
// those that failed among the others. The end of ctx ends the process. Like [Run], it widens the
// range of ports in the namespace.
func (d Dials) Run(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup) ([]Dial, error) {
	if d.Network != "tcp" && d.Network != "udp" || !d.Target.IsValid() || d.Rate <= 0 || d.Duration <= 0 || d.Timeout < 0 ||
		d.Network == "udp" && d.Timeout == 0 {
		return nil, fmt.Errorf("dials: %+v: want tcp or udp, a target, a rate, a duration, and for udp a timeout", d)
	}
	var dials []Dial
	if err := runRole(ctx, ns, cg, "dialer", dialerThreads, d, &dials); err != nil {
		return nil, fmt.Errorf("dials: %w", err)
	}

	return dials, nil
}

// dialerThreads is how many goroutines run at a time: few, because it is the server and the
// kernel that have something to do.
const dialerThreads = 2

// dial is the process that makes [Dials].
func dial(stdin io.Reader, stdout io.Writer) error {
	debug.SetGCPercent(100) // unlike the other roles it makes garbage
	var d Dials
	if err := json.NewDecoder(stdin).Decode(&d); err != nil {
		return fmt.Errorf("read dials: %w", err)
	}
	// Not exitAtEnd, whose system call the collector of garbage would wait for.
	go func() {
		_, _ = io.Copy(io.Discard, stdin)
		os.Exit(1)
	}()

	var (
		running sync.WaitGroup
		mu      sync.Mutex
		dials   []Dial
	)
	start := time.Now()
	for turn := 0; ; turn++ {
		due := time.Duration(turn) * time.Second / time.Duration(d.Rate)
		if due >= d.Duration {
			break
		}
		time.Sleep(time.Until(start.Add(due)))
		running.Go(func() {
			made := d.dial(turn)
			mu.Lock()
			defer mu.Unlock()
			dials = append(dials, made)
		})
	}
	running.Wait()

	return gob.NewEncoder(stdout).Encode(dials)
}

// dial makes one connection.
func (d Dials) dial(turn int) Dial {
	dialer := net.Dialer{Timeout: d.Timeout, KeepAlive: -1}
	if len(d.Sources) > 0 {
		source := net.TCPAddrFromAddrPort(netip.AddrPortFrom(d.Sources[turn%len(d.Sources)], 0))
		dialer.LocalAddr = source
		if d.Network == "udp" {
			dialer.LocalAddr = (*net.UDPAddr)(source)
		}
		// The port is chosen at connect: by then the kernel knows which ports the target has.
		dialer.Control = func(_, _ string, raw syscall.RawConn) (err error) {
			return errors.Join(raw.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
			}), err)
		}
	}
	made := Dial{Began: Clock()}
	conn, err := dialer.Dial(d.Network, d.Target.String())
	made.Took = Clock() - made.Began
	if err != nil {
		made.Failed = reasonOf("connect", err)

		return made
	}
	defer conn.Close()
	made.Connected = d.Network == "tcp"
	line, err := d.ask(conn)
	if d.Network == "udp" {
		made.Took = Clock() - made.Began
	}
	if err == nil {
		var answer lab.Answer
		answer, err = lab.ParseAnswer(line)
		made.Backend = answer.Local.Addr()
	}
	if err != nil {
		made.Failed = reasonOf("answer", err)
	}

	return made
}

// ask asks who answers. A datagram is sent again while there is no answer; that a backend
// refuses it is no answer, too.
func (d Dials) ask(conn net.Conn) (string, error) {
	wait, deadline := answerTimeout, time.Now().Add(answerTimeout)
	if d.Network == "udp" {
		wait, deadline = repeatAfter, time.Now().Add(d.Timeout)
	}
	buffer := make([]byte, 256)
	for {
		next := time.Now().Add(wait)
		if next.After(deadline) {
			next = deadline
		}
		err := conn.SetDeadline(next)
		if err == nil {
			_, err = io.WriteString(conn, "who\n")
		}
		line := ""
		for err == nil && !strings.HasSuffix(line, "\n") {
			var n int
			n, err = conn.Read(buffer)
			line += string(buffer[:n])
		}
		if err == nil || d.Network == "tcp" {
			return line, err
		}
		time.Sleep(time.Until(next))
		if !time.Now().Before(deadline) {
			return "", err
		}
	}
}

// reasonOf is an error without addresses, so that equal ones can be counted.
func reasonOf(step string, err error) string {
	var timeout net.Error
	var errno syscall.Errno
	switch {
	case errors.As(err, &timeout) && timeout.Timeout():
		return step + ": no answer in time"
	case errors.As(err, &errno):
		return step + ": " + errno.Error()
	}

	return step + ": " + err.Error()
}
