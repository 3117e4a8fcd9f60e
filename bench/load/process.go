package load

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"github.com/sluice-lb/sluice/test/lab"
)

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

// wait waits for the end. The error of a process that failed says what it output.
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
