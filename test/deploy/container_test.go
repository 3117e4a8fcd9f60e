package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// containerSpec is what a container runtime gets to run a container.
type containerSpec struct {
	Root         string // the image's files; what is mounted gets its folders there
	ReadOnly     bool   // the root
	Mounts       []mount
	Args, Env    []string
	Capabilities []string // "NET_ADMIN"; no others can be had
	NoNewPrivs   bool
	HostPID      bool
	Node         cgroupNode // that runs the container
	Privileged   bool       // all capabilities, all system calls, and /proc/sys can be written to
}

// mount is a folder of the node that a container sees.
type mount struct {
	From, To string
	ReadOnly bool
	Slave    bool // what is mounted below it on the node later is seen, too
}

// specVariable holds the spec for this executable when it becomes a container.
const specVariable = "SLUICE_DEPLOY_CONTAINER"

// container is a process with namespaces of its own: for mounts, cgroups, IPC and
// the host name, and for processes unless it has the host's. Its network is that
// of a namespace of the lab.
type container struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // how, to be read after that
	log  lab.Log
}

// mustRun starts a container in a network namespace and a cgroup. It ends with
// the test.
func mustRun(t testing.TB, ns *lab.Namespace, cgroup *lab.Cgroup, spec containerSpec) *container {
	t.Helper()
	text, err := json.Marshal(spec)
	lab.Must(t, err)
	flags := uintptr(unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS)
	if !spec.HostPID {
		flags |= unix.CLONE_NEWPID
	}
	c := &container{cmd: exec.Command("/proc/self/exe"), done: make(chan struct{})}
	c.cmd.Args[0] = "container"
	c.cmd.Env = []string{specVariable + "=" + string(text)}
	c.cmd.Stdout, c.cmd.Stderr = &c.log, &c.log
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	if err := lab.Start(ns, cgroup, c.cmd); err != nil {
		t.Fatalf("start of a container: %v", err)
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.done)
	}()
	t.Cleanup(func() {
		c.kill()
		if t.Failed() {
			t.Logf("%s:\n%s", strings.Join(spec.Args, " "), c.log.String())
		}
	})

	return c
}

// ended is an error until the container has ended.
func (c *container) ended() error {
	select {
	case <-c.done:
		return nil
	default:
		return errors.New("it runs")
	}
}

// kill ends the container at once. Killing one that has ended is no error.
func (c *container) kill() {
	_ = c.cmd.Process.Kill()
	<-c.done
}

// mustStop ends the container as a kubelet does, and waits for its end, which
// is its own.
func (c *container) mustStop(t testing.TB) {
	t.Helper()
	lab.Must(t, c.cmd.Process.Signal(unix.SIGTERM))
	<-c.done
	if c.err != nil {
		t.Fatalf("the container ended with %v, want 0: %s", c.err, c.log.String())
	}
}

// status returns a line of the process' status: "CapEff".
func (c *container) status(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	lab.Must(t, err)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("the status of a process has no %s", name)

	return ""
}

// oomScore returns how soon the kernel ends the process when memory runs out.
func (c *container) oomScore(t testing.TB) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", c.cmd.Process.Pid))
	lab.Must(t, err)

	return strings.TrimSpace(string(text))
}

// without is a list without one of its elements.
func without(all []string, one string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(is string) bool { return is == one })
}
