package lab

import (
	"fmt"
	"os/exec"
	"strings"
	"syscall"
)

// Start starts a command inside the namespace and the cgroup, in both from its
// start. Either may be nil: then it is that of the calling process. The file
// system is the caller's too, so /sys shows the devices of the caller, and the
// cgroup and BPF mounts are where they were.
func Start(ns *Namespace, cg *Cgroup, cmd *exec.Cmd) error {
	if cg != nil {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &syscall.SysProcAttr{}
		}
		cmd.SysProcAttr.UseCgroupFD = true
		cmd.SysProcAttr.CgroupFD = int(cg.dir.Fd())
	}
	if ns == nil {
		return cmd.Start()
	}

	return ns.Do(cmd.Start)
}

// Output runs a command as [Start] does, to its end, and returns what it
// printed. The error of a command that fails includes what it printed.
func Output(ns *Namespace, cg *Cgroup, name string, args ...string) (string, error) {
	var printed strings.Builder
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = &printed, &printed

	err := Start(ns, cg, cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		return printed.String(), fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(printed.String()))
	}

	return printed.String(), nil
}
