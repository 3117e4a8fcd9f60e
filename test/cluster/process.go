package cluster

import (
	"os/exec"
	"path/filepath"
	"syscall"
)

// process is a child of this one. The kernel kills it if this one ends first. What
// is typed at a terminal (Ctrl-C) does not reach it.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has ended
	err    error         // how it has ended, to be read after that
}

func (p *process) name() string {
	return filepath.Base(p.cmd.Path)
}

// wait waits for the end and returns the result of [exec.Cmd.Wait].
func (p *process) wait() error {
	<-p.exited

	return p.err
}

// kill ends the process at once. A process that has ended, and a nil one, is
// not an error.
func (p *process) kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.exited
}

// start starts cmd in the namespace.
func (n *namespace) start(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error, 1)

	// The signal is sent when the thread that is the parent ends, which need
	// not be the end of the process. So the thread waits for its child.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	go func() {
		started <- n.do(func() error {
			if err := cmd.Start(); err != nil {
				return err
			}
			started <- nil
			p.err = cmd.Wait()
			close(p.exited)
			return nil
		})
	}()
	if err := <-started; err != nil {
		return nil, err
	}

	return p, nil
}
