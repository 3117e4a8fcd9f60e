package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Probe is a process that observes when a Service reaches a new backend: it connects
// again and again, asks the server for its address, and reports when that is the expected
// one. Its methods must not be called concurrently.
type Probe struct {
	process *process
	results *bufio.Reader
	busy    bool // an Awaited is not over
}

// question is a request to a probe: connect to Target until Want answers. Without a
// target it means: give up.
type question struct {
	Target netip.AddrPort
	Want   netip.Addr
}

// result is what a probe writes: once with Begun after the first try, and once at the end.
type result struct {
	Begun           bool
	GaveUp          bool
	First           int64 // ns, of the kernel's CLOCK_MONOTONIC
	Tries, Failures int
}

// StartProbe starts a probe in a namespace and a cgroup, each of which may be nil.
// The caller closes it.
func StartProbe(ns *lab.Namespace, cg *lab.Cgroup) (*Probe, error) {
	err := widenPorts(ns)
	var p *process
	if err == nil {
		p, err = startRole(ns, cg, "probe", probeThreads)
	}
	if err != nil {
		return nil, fmt.Errorf("start probe: %w", err)
	}

	return &Probe{process: p, results: bufio.NewReader(p.stdout)}, nil
}

// Close ends the process. Closing twice is not an error.
func (p *Probe) Close() error { return p.process.close() }

// Awaited is a backend that a [Probe] waits for.
type Awaited struct{ probe *Probe }

// Await begins to ask target, until a server at the address want answers. It
// returns when the first try is over, whatever its outcome. A probe waits for one
// backend at a time, so that [Awaited.Wait] must be called before the next.
func (p *Probe) Await(ctx context.Context, target netip.AddrPort, want netip.Addr) (*Awaited, error) {
	if p.busy {
		return nil, errors.New("probe: already waits for a backend")
	}
	if err := p.ask(question{Target: target, Want: want}); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	// A try takes 20 ms at most: if ctx ends before, the process hangs.
	defer context.AfterFunc(ctx, func() { _ = p.process.kill() })()
	if _, err := p.read(); err != nil {
		return nil, errors.Join(err, context.Cause(ctx))
	}
	p.busy = true

	return &Awaited{p}, nil
}

// Wait waits until the backend has answered. First is when the connect call
// returned of the first connection that it answered; tries are how many connections
// were tried, that one included, and failures how many of them were
// not answered. The end of the context ends the attempt; then the error wraps its
// cause.
func (a *Awaited) Wait(ctx context.Context) (first time.Time, tries, failures int, err error) {
	p, asked := a.probe, make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = p.ask(question{}) // a process that has ended shows when it is read
		close(asked)
	})
	r, err := p.read()
	if !stop() {
		<-asked // not to end a later attempt
	}
	p.busy = false
	switch {
	case err != nil:
		return time.Time{}, 0, 0, err
	case r.GaveUp:
		err = fmt.Errorf("probe: gave up after %d tries, %d of them failed: %w", r.Tries, r.Failures, context.Cause(ctx))

		return time.Time{}, r.Tries, r.Failures, err
	}
	first, err = timeAt(r.First)

	return first, r.Tries, r.Failures, err
}

func (p *Probe) ask(q question) error {
	if err := json.NewEncoder(p.process.stdin).Encode(q); err != nil {
		return fmt.Errorf("ask probe: %w", err)
	}

	return nil
}

func (p *Probe) read() (r result, err error) {
	line, err := p.results.ReadBytes('\n')
	if err != nil {
		return r, fmt.Errorf("probe has ended: %w", errors.Join(err, p.process.wait()))
	}

	return r, json.Unmarshal(line, &r)
}

// timeAt turns a reading of CLOCK_MONOTONIC, which is the same for all processes,
// into a time that can be compared with others of this process.
func timeAt(monotonic int64) (time.Time, error) {
	reading, err := readMonotonic()

	return time.Now().Add(time.Duration(monotonic - reading)), err
}

// readMonotonic reads CLOCK_MONOTONIC, in ns.
func readMonotonic() (int64, error) {
	var reading unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &reading); err != nil {
		return 0, fmt.Errorf("read clock: %w", err)
	}

	return reading.Nano(), nil
}

const (
	// The one that asks, the one that reads, and what the runtime may want.
	probeThreads = 4
	// Between two tries, so that the probe is no load.
	probePause = 50 * time.Microsecond
	// How long a system call of a try may take. It does not wait longer, because
	// the next try may reach another backend.
	tryTimeout = 20 * time.Millisecond
)

// poll is the probe's process: it reads questions and writes results.
func poll(stdin io.Reader, stdout io.Writer) error {
	p := &poller{
		questions: make(chan question),
		results:   json.NewEncoder(stdout),
		request:   newRequest(askAddress, headerSize, addressSize),
		answer:    make([]byte, addressSize),
		timeout:   unix.NsecToTimeval(int64(tryTimeout)),
	}
	go p.run()
	questions := json.NewDecoder(stdin)
	for {
		var q question
		if err := questions.Decode(&q); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("read question: %w", err)
		}
		if !q.Target.IsValid() {
			p.stop.Store(true)

			continue
		}
		p.stop.Store(false)
		p.questions <- q
	}
}

// poller is the thread that asks.
type poller struct {
	questions chan question
	stop      atomic.Bool
	results   *json.Encoder

	request, answer []byte
	timeout         unix.Timeval
}

func (p *poller) run() {
	err := wakeInTime()
	for err == nil {
		err = p.await(<-p.questions)
	}
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

// await asks until the wanted backend answers, or until it is stopped.
func (p *poller) await(q question) error {
	target, want := newSockaddr(q.Target), q.Want.As16()
	var r result
	for {
		server, connected, ok := p.try(&target)
		r.Tries++
		if !ok {
			r.Failures++
		}
		if r.Tries == 1 {
			if err := p.results.Encode(result{Begun: true}); err != nil {
				return err
			}
		}
		switch {
		case ok && netip.AddrFrom16(server).Unmap() == netip.AddrFrom16(want).Unmap():
			r.First = connected

			return p.results.Encode(r)
		case p.stop.Load():
			r.GaveUp = true

			return p.results.Encode(r)
		}
		pause(probePause)
	}
}

// try makes a connection, asks for the address of the server, and resets it, so that
// neither a socket here nor a node that tracks connections keeps state.
func (p *poller) try(target *sockaddr) (server [16]byte, connected int64, ok bool) {
	fd, errno := openSocket(target.family, unix.SOCK_STREAM)
	if errno != 0 {
		return server, 0, false
	}
	defer closeSocket(fd)
	if resetAtClose(fd) != 0 ||
		setTimeouts(fd, &p.timeout) != 0 ||
		connectSocket(fd, target) != 0 {
		return server, 0, false
	}
	connected, err := readMonotonic()
	if err != nil || send(fd, p.request, nil) != 0 || receiveAll(fd, p.answer) != 0 {
		return server, 0, false
	}

	return [16]byte(p.answer[headerSize:]), connected, true
}
