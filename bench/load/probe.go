package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// Probe is a process that observes when a Service reaches a new backend: it connects
// again and again, asks the server for its address, and reports when that is the expected
// one. Its methods must not be called concurrently.
type Probe struct {
	process *process
	results *json.Decoder
	timeout time.Duration // of the last question
}

// question is a request to a probe: connect to Target until Want answers, or until the timeout is over.
type question struct {
	Target  netip.AddrPort
	Want    netip.Addr
	Timeout time.Duration
}

// result is what a probe writes: once after the first try, and once at the end.
type result struct {
	First           time.Duration // by [Clock]; 0: it gave up
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

	return &Probe{process: p, results: json.NewDecoder(p.stdout)}, nil
}

// Close ends the process. Closing twice is not an error.
func (p *Probe) Close() error { return p.process.close() }

// Await begins to ask target, until a server at the address want answers or the timeout is over. It
// returns when the first try is over, whatever its outcome. A probe waits for one backend at a time,
// so that [Probe.Wait] must be called before the next. The end of ctx ends the probe.
func (p *Probe) Await(ctx context.Context, target netip.AddrPort, want netip.Addr, timeout time.Duration) error {
	p.timeout = timeout
	if err := json.NewEncoder(p.process.stdin).Encode(question{target, want, timeout}); err != nil {
		return fmt.Errorf("ask probe: %w", errors.Join(err, p.Close()))
	}
	_, err := p.read(ctx)

	return err
}

// Wait waits until the backend has answered, and returns when the connect call returned of the first
// connection that it answered. The end of ctx ends the probe.
func (p *Probe) Wait(ctx context.Context) (time.Time, error) {
	r, err := p.read(ctx)
	switch {
	case err != nil:
		return time.Time{}, err
	case r.First == 0:
		return time.Time{}, fmt.Errorf("probe: gave up after %v and %d tries, %d of them failed", p.timeout, r.Tries, r.Failures)
	}

	return time.Now().Add(r.First - Clock()), nil
}

func (p *Probe) read(ctx context.Context) (r result, err error) {
	defer context.AfterFunc(ctx, func() { _ = p.process.kill() })()
	if err := p.results.Decode(&r); err != nil {
		return r, fmt.Errorf("probe has ended: %w", errors.Join(err, p.process.wait(), context.Cause(ctx)))
	}

	return r, nil
}

const (
	// The one that asks, and what the runtime may want.
	probeThreads = 4
	// Between two tries, so that the probe is no load.
	probePause = 50 * time.Microsecond
	// How long a system call of a try may take. It does not wait longer, because
	// the next try may reach another backend.
	tryTimeout = 20 * time.Millisecond
)

// poll is the probe's process: it reads questions and writes results, on one thread.
func poll(stdin io.Reader, stdout io.Writer) error {
	runtime.LockOSThread()
	if err := wakeInTime(); err != nil {
		return fmt.Errorf("set timer slack: %w", err)
	}
	p := &poller{
		results: json.NewEncoder(stdout),
		request: newRequest(askAddress, headerSize, addressSize),
		answer:  make([]byte, addressSize),
		timeout: unix.NsecToTimeval(int64(tryTimeout)),
	}
	for questions := json.NewDecoder(stdin); ; {
		var q question
		err := questions.Decode(&q)
		if err == nil {
			err = p.await(q)
		}
		if err != nil {
			return fmt.Errorf("question: %w", err)
		}
	}
}

// poller is the thread that asks.
type poller struct {
	results *json.Encoder

	request, answer []byte
	timeout         unix.Timeval
}

// await asks until the wanted backend answers, or until the time is over.
func (p *poller) await(q question) error {
	target, want, deadline := newSockaddr(q.Target), q.Want.As4(), now()+q.Timeout
	var r result
	for {
		server, connected, ok := p.try(&target)
		r.Tries++
		if !ok {
			r.Failures++
		}
		if r.Tries == 1 {
			if err := p.results.Encode(r); err != nil {
				return err
			}
		}
		switch {
		case ok && server == want:
			r.First = connected

			return p.results.Encode(r)
		case now() > deadline:
			return p.results.Encode(r)
		}
		pause(probePause)
	}
}

// try makes a connection, asks for the address of the server, and resets it, so that
// neither a socket here nor a node that tracks connections keeps state.
func (p *poller) try(target *sockaddr) (server [4]byte, connected time.Duration, ok bool) {
	fd, errno := openSocket(unix.SOCK_STREAM)
	if errno != 0 {
		return server, 0, false
	}
	defer closeSocket(fd)
	if resetAtClose(fd) != 0 ||
		setTimeouts(fd, &p.timeout) != 0 ||
		connectSocket(fd, target) != 0 {
		return server, 0, false
	}
	connected = Clock()
	if send(fd, p.request, nil) != 0 || receiveAll(fd, p.answer) != 0 {
		return server, 0, false
	}

	return [4]byte(p.answer[headerSize:]), connected, true
}
