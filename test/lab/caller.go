package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
)

// ErrCallerGone is returned when a [Caller]'s process has ended.
var ErrCallerGone = errors.New("caller is gone")

// Caller is a process inside a namespace and a cgroup, in both from its start,
// that makes system calls on sockets on request. It is like a program in a pod: a
// socket belongs for life to the cgroup v2 of the process that made it, so hooks attached there see a caller's sockets and no others, also not those
// of the test itself. (A single thread could only move into a threaded cgroup,
// which is not what a pod is in.)
//
// It is this executable, run a second time: [Main] must have been called. Its
// methods may be called from many goroutines at once. A call takes some 80 µs on
// two cores.
type Caller struct {
	cmd *exec.Cmd

	mu      sync.Mutex
	calls   *json.Encoder
	last    uint64
	waiting map[uint64]chan<- answer // nil when the process is gone

	done chan struct{} // closed when all answers are read
}

// StartCaller starts a caller. Namespace and cgroup may be nil: then they are
// those of the calling process. The caller closes it.
func StartCaller(ns *Namespace, cg *Cgroup) (*Caller, error) {
	if !mainCalled.Load() {
		return nil, errors.New("start caller: lab.Main was not called first in TestMain or main")
	}

	return startCaller(again(roleCaller), func(cmd *exec.Cmd) error { return Start(ns, cg, cmd) })
}

// CallThrough starts a caller that is somewhere else, such as in a container: the
// standard input and output of a command lead to a process that runs [ServeCalls].
// The caller closes it.
func CallThrough(cmd *exec.Cmd) (*Caller, error) {
	return startCaller(cmd, (*exec.Cmd).Start)
}

func startCaller(cmd *exec.Cmd, start func(*exec.Cmd) error) (*Caller, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, fmt.Errorf("start caller: %w", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start caller: %w", err)
	}
	if err := start(cmd); err != nil {
		return nil, fmt.Errorf("start caller: %w", err)
	}
	c := &Caller{
		cmd:     cmd,
		calls:   json.NewEncoder(in),
		waiting: make(map[uint64]chan<- answer),
		done:    make(chan struct{}),
	}
	go c.read(json.NewDecoder(out))

	return c, nil
}

// read delivers every answer to the call that waits for it.
func (c *Caller) read(answers *json.Decoder) {
	defer close(c.done)
	for {
		var answer answer
		err := answers.Decode(&answer)

		c.mu.Lock()
		if err != nil {
			for _, wait := range c.waiting {
				close(wait)
			}
			c.waiting = nil
			c.mu.Unlock()
			return
		}
		wait := c.waiting[answer.ID]
		delete(c.waiting, answer.ID)
		c.mu.Unlock()
		wait <- answer // never blocks
	}
}

// call sends a call and waits for its answer.
func (c *Caller) call(call call) (answer, error) {
	wait := make(chan answer, 1)
	if err := c.send(call, wait); err != nil {
		return answer{}, err
	}
	got, ok := <-wait
	if !ok {
		return answer{}, fmt.Errorf("%s: %w", call.Act, ErrCallerGone)
	}

	return got, got.Failure.err()
}

func (c *Caller) send(call call, wait chan<- answer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		return fmt.Errorf("%s: %w", call.Act, ErrCallerGone)
	}
	c.last++
	call.ID = c.last
	c.waiting[call.ID] = wait
	if err := c.calls.Encode(call); err != nil {
		delete(c.waiting, call.ID)
		return fmt.Errorf("%s: %w: %w", call.Act, ErrCallerGone, err)
	}

	return nil
}

// PID is the process.
func (c *Caller) PID() int { return c.cmd.Process.Pid }

// Cgroup is the cgroup that the process sees itself in: the path below the root
// of cgroup v2.
func (c *Caller) Cgroup() (string, error) {
	answer, err := c.call(call{Act: actCgroup})
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(answer.Bytes)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path), nil
		}
	}

	return "", errors.New("caller is in no cgroup v2")
}

// Request asks a [Server] for its name. It is [Caller.Exchange] with nothing but a
// network and an address.
func (c *Caller) Request(network, address string) (Reply, error) {
	return c.Exchange(Exchange{Network: network, Address: address})
}

// Exchange does one exchange, in one call. Errors wrap the [unix.Errno] of the
// system call that failed ([Errno] extracts it): ETIMEDOUT if it took too long,
// ENODATA if the connection ended instead of an answer.
func (c *Caller) Exchange(x Exchange) (Reply, error) {
	answer, err := c.call(call{Act: actExchange, Exchange: &x})
	if answer.Reply == nil {
		return Reply{}, err
	}

	return *answer.Reply, err
}

// Close ends the process, and its sockets with it. Closing twice is not an
// error.
func (c *Caller) Close() error {
	if c.cmd.ProcessState != nil {
		return nil
	}
	// It may have been killed already, with its cgroup.
	err := c.cmd.Process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	<-c.done
	var exit *exec.ExitError
	if waited := c.cmd.Wait(); !errors.As(waited, &exit) || exit.Exited() {
		err = errors.Join(err, waited)
	}

	return err
}
