// Package load measures connections and datagrams, IPv4 only: a load generator, a
// server that answers it, a probe that sees when a Service leads elsewhere, iperf3 for
// bulk transfers, and a client-go watch to compare a proxy with. Each is a process in a
// namespace and a cgroup of the lab, so that socket hooks see it as they see a pod. [Main]
// must be called first.
//
// # What is on the clock
//
//	connect          socket  [connect]  send receive  close
//	exchange                            [send receive]
//	udp-connected                       [send receive]
//	udp-unconnected                     [sendto recvfrom]
//	udp-new         [socket   connect   send receive  close]
//
// Each client is a thread of the generator that blocks in these system calls. The
// clock is CLOCK_MONOTONIC, read right before and after. Latencies are counted in
// a histogram with three digits (hdrhistogram). The response must repeat the request's number, and come
// from the address that was asked; otherwise, or after a second, the exchange has
// failed. What failed is counted beside the latencies, and is not among them.
//
// # Closed loop, or due times
//
// Without a rate, a client begins when it has done with the exchange before: a
// closed loop. It shows the throughput at saturation, and the latency of each exchange
// that was made. It does not show how long others would have waited: while the
// server stands still for 300 ms, such a client makes one slow exchange instead of
// the 300 that would have come, and the 99th percentile does not move. (This is
// what "coordinated omission" means: the load waits for what it measures.)
//
// With a rate, exchanges are due at even distances, and the clock runs from the
// moment at which one was due, whether a client was ready or not. What
// [Result.Lateness] contains is part of those latencies: the time that clients were
// busy with exchanges before, and what the kernel takes to wake a sleeping thread.
// An exchange that is due is made, or counted as a failure: none is left out.
//
// # The window
//
// What begins (with a rate: is due) in the warm-up is not counted. All clients have
// their connections and caches then. What begins in the window counts, also when it
// ends after it.
//
// # What it costs to measure
//
// Go's package net would take part in the measurement: a poller, a scheduler, and
// several system calls for one. Here, threads make raw system calls, to addresses
// prepared before; the runtime collects nothing, and threads have their places in
// its scheduler for good. What is left: two readings of the clock for each
// exchange, some 30 ns each; a time-out for each socket that is made, two system calls; and,
// a hundred times a second, the scheduler's own check of all threads.
//
// Sampled by perf, 4.1 % of the generator's CPU time are spent in user mode when it
// connects (16 clients, two processors), 0.3 % by Go's runtime; the rest is the
// kernel's. Of the server's, 6.1 % and 1.5 %. Beside a minimal program in C with the same
// system calls, on a veth pair and to the same server, it takes 2 µs more in user
// mode for each connection, of some 80 µs; the difference in rate is within the
// noise.
//
// # The server
//
// A connection is accepted when its request has come (TCP_DEFER_ACCEPT). Client
// and server share their processors here, which no client does with a server
// elsewhere: a thread that the handshake wakes takes the client's place while that
// is in its connect call. With 16 clients on two processors, the connect call then
// took 48 µs in the median, and the ninth decile was 1.1 ms; with a request to
// accept by, it takes 19 and 34 µs. What is on the wire is the same.
//
// A connection is closed by the client, with a FIN, unless [Work.Closing] differs.
// So the client keeps it in TIME_WAIT; see [Run] for how it does not run out
// of ports. The probe resets its connections.
package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// roleVariable is the environment variable by which this executable gets another role.
const roleVariable = "SLUICE_LOAD_ROLE"

// roles are the functions of the processes that this package starts.
var roles = map[string]func(stdin io.Reader, stdout io.Writer) error{"generator": generate, "server": serve, "probe": poll, "dialer": dial, "watcher": follow}

// mainCalled reports whether [Main] runs in this executable. Without it, a child would
// run the whole program again, which would start another child.
var mainCalled atomic.Bool

var errMainNotCalled = errors.New("load.Main was not called first in main or TestMain")

// Main lets the package run this executable a second time, as load generator,
// server, probe or watch. It is called first in main or TestMain; in such a second run it
// does the work and does not return.
func Main() {
	mainCalled.Store(true)
	name := os.Getenv(roleVariable)
	if name == "" {
		return
	}
	err := fmt.Errorf("unknown %s=%s", roleVariable, name)
	if role := roles[name]; role != nil {
		err = role(os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// startRole starts this executable in another role, with so many goroutines at a time; 0: with the
// runtime as it is. Otherwise the runtime must not disturb the measurement. Goroutines that measure
// or serve block in system calls that the scheduler does not see, so each keeps its P: GOMAXPROCS is
// the exact number, because the scheduler wakes threads to look for work on spare ones. Garbage
// collection and preemption are off.
func startRole(ns *lab.Namespace, cg *lab.Cgroup, role string, goroutines int) (*process, error) {
	if !mainCalled.Load() {
		return nil, errMainNotCalled
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "load-" + role
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	if goroutines > 0 {
		cmd.Env = append(cmd.Env, "GOMAXPROCS="+strconv.Itoa(goroutines), "GOGC=off", "GODEBUG=asyncpreemptoff=1")
	}

	return startProcess(ns, cg, cmd)
}

// runRole has this executable do in another role what input says, and reads what comes out. The end
// of ctx ends the process; then the error is the context's cause.
func runRole(ctx context.Context, ns *lab.Namespace, cg *lab.Cgroup, role string, goroutines int, input, output any) error {
	if err := widenPorts(ns); err != nil {
		return err
	}
	p, err := startRole(ns, cg, role, goroutines)
	if err != nil {
		return err
	}
	defer p.close()
	defer context.AfterFunc(ctx, func() { _ = p.kill() })()
	if err = json.NewEncoder(p.stdin).Encode(input); err == nil {
		err = gob.NewDecoder(p.stdout).Decode(output)
	}
	if err != nil {
		_ = p.stdin.Close() // so that it ends
	}
	if failed := p.wait(); failed != nil {
		err = failed // it has the reason why there is no result
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}

	return err
}

// ready is what a process prints when it has begun to do what it is for.
const ready = "ready"

// awaitReady sends the process what it needs, and returns when it is ready. It ends one that does not become so.
func (p *process) awaitReady(input any) error {
	err := json.NewEncoder(p.stdin).Encode(input)
	line := ""
	if err == nil {
		line, err = bufio.NewReader(p.stdout).ReadString('\n')
	}
	if err == nil && strings.TrimSpace(line) == ready {
		return nil
	}
	_ = p.stdin.Close() // so that it ends
	if failed := p.wait(); failed != nil {
		err = failed // it has the reason why there is no line
	}

	return errors.Join(err, p.close())
}

// exitAtEnd ends the process when the other end of stdin is closed.
func exitAtEnd() {
	var ignored [64]byte
	for n := 1; n > 0; {
		n, _ = read(unix.Stdin, ignored[:])
	}
	os.Exit(1)
}

// process is one that lives no longer than this one, whatever ends this one.
type process struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *os.File
	stderr bytes.Buffer // to be read when done

	done chan struct{} // closed when it has ended
	err  error         // how; to be read when done
}

// startProcess starts a command with pipes in a namespace and a cgroup, each of
// which may be nil. The caller ends it.
func startProcess(ns *lab.Namespace, cg *lab.Cgroup, cmd *exec.Cmd) (*process, error) {
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	// Not StdoutPipe, which is closed as soon as the process has ended.
	out, in, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, stdin.Close())
	}
	p := &process{cmd: cmd, stdin: stdin, stdout: out, done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = in, &p.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}

	started := make(chan error, 1)
	go p.run(ns, cg, started)
	err = <-started
	_ = in.Close() // the process has its own
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", cmd.Args[0], err), stdin.Close(), out.Close())
	}

	return p, nil
}

// run starts the process and waits for its end, on a thread that lives as long: the
// parent-death event that the kernel sends is that of the thread that
// started it.
func (p *process) run(ns *lab.Namespace, cg *lab.Cgroup, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := lab.Start(ns, cg, p.cmd)
	started <- err
	if err == nil {
		p.err = p.cmd.Wait()
		close(p.done)
	}
}

// wait waits for the end. The error of a process that failed quotes what it printed.
func (p *process) wait() error {
	<-p.done
	if p.err == nil {
		return nil
	}

	return fmt.Errorf("%s: %w: %s", p.cmd.Args[0], p.err, strings.TrimSpace(p.stderr.String()))
}

// kill ends the process, if it has not ended, and waits.
func (p *process) kill() error {
	err := p.cmd.Process.Kill()
	<-p.done
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}

	return err
}

// close ends the process and closes the pipes. Closing twice is not an error.
func (p *process) close() error {
	err := p.kill()
	_ = p.stdin.Close()
	_ = p.stdout.Close()

	return err
}
