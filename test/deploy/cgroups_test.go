package deploy

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

// The cgroup layouts of systemd.
const (
	unified = "unified" // cgroup2 at /sys/fs/cgroup
	hybrid  = "hybrid"  // at /sys/fs/cgroup/unified, beside cgroup v1
)

// cgroups are those of a node that is itself a container, as kind's nodes are. On
// other nodes the root is that of the machine, which nothing here may attach to.
//
//	machine's root of cgroup2
//	└─ sluice-…-deploy      root of the node's cgroup namespace, with controllers
//	   ├─ init.scope        the node's first process
//	   └─ kubepods
//	      ├─ agent          root of its container's cgroup namespace, if unified
//	      └─ others
type cgroups struct {
	root, agent, others *lab.Cgroup
	node                cgroupNode
}

// cgroupNode is the node's first process, which has its cgroup and mount
// namespaces. Without a PID it is the machine itself.
type cgroupNode struct {
	PID    int
	Hybrid bool
}

// layoutVariable holds the layout for this executable when it becomes the first
// process of a node.
const layoutVariable = "SLUICE_DEPLOY_NODE"

func mustCgroups(t testing.TB, layout string) *cgroups {
	t.Helper()
	controller := mustController(t)
	c := &cgroups{root: lab.MustCgroup(t, "deploy")}
	init, err := c.root.Child("init.scope")
	lab.Must(t, err)
	pods, err := c.root.Child("kubepods")
	lab.Must(t, err)
	c.agent, err = pods.Child("agent")
	lab.Must(t, err)
	c.others, err = pods.Child("others")
	lab.Must(t, err)

	// Started in the root, so that this is the root of its namespace.
	cmd := exec.Command("/proc/self/exe")
	cmd.Args[0] = "node"
	cmd.Env = append(os.Environ(), layoutVariable+"="+layout)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	lab.Must(t, err)
	lab.Must(t, lab.Start(nil, c.root, cmd))
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the node's first process says %q: %v", line, err)
	}
	c.node = cgroupNode{PID: cmd.Process.Pid, Hybrid: layout == hybrid}
	if pids, err := init.Processes(); !slices.Equal(pids, []int{c.node.PID}) {
		t.Fatalf("in init.scope are %v, %v, want %d", pids, err, c.node.PID)
	}
	if controller == "" {
		t.Log("this machine has no controller for cgroup2: roots of nodes do not refuse processes")

		return c
	}
	lab.Must(t, writeControl(c.root.Path(), "+"+controller))
	if err := lab.Start(nil, c.root, exec.Command("true")); !errors.Is(err, unix.EBUSY) {
		t.Fatalf("start of a process in the root of the node: %v, want %v, because of its controllers", err, unix.EBUSY)
	}

	return c
}

// enabledMark is an attribute of the root of cgroup2 that records that tests enabled a
// controller there. Runs at the same time share it.
const enabledMark = "trusted.sluice-deploy"

// mustController returns a controller that cgroups of the machine can give to
// their children, after which they refuse processes, or "" if there is none. If a
// test enabled it for that, the last one that uses it disables it.
func mustController(t testing.TB) string {
	t.Helper()
	root, err := lab.CgroupRoot()
	lab.Must(t, err)
	for _, file := range []string{"cgroup.subtree_control", "cgroup.controllers"} {
		text, err := os.ReadFile(filepath.Join(root, file))
		lab.Must(t, err)
		for _, name := range strings.Fields(string(text)) {
			// Other controllers work on threads, which any cgroup may have.
			if !slices.Contains([]string{"memory", "io", "hugetlb", "rdma", "misc"}, name) {
				continue
			}
			t.Cleanup(func() { disableController(t, root) })
			if file == "cgroup.controllers" {
				lab.Must(t, unix.Setxattr(root, enabledMark, []byte(name), 0))
				lab.Must(t, writeControl(root, "+"+name))
			}

			return name
		}
	}

	return ""
}

// disableController disables the controller that a test enabled, unless another run
// still uses it. It does nothing if the machine has one enabled.
func disableController(t testing.TB, root string) {
	mark := make([]byte, 64)
	n, err := unix.Getxattr(root, enabledMark, mark)
	if errors.Is(err, unix.ENODATA) {
		return
	}
	name := string(mark[:max(n, 0)])
	if err == nil {
		err = writeControl(root, "-"+name)
	}
	if err == nil {
		err = unix.Removexattr(root, enabledMark)
	}
	if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODATA) {
		t.Errorf("the controller %s stays enabled: %v", name, err)
	}
}

func writeControl(cgroup, text string) error {
	return os.WriteFile(filepath.Join(cgroup, "cgroup.subtree_control"), []byte(text), 0)
}

// becomeNode makes this process the first of a node, if its environment asks for it.
// It returns if not.
func becomeNode() {
	layout := os.Getenv(layoutVariable)
	if layout == "" {
		return
	}
	runtime.LockOSThread() // which becomes the process
	err := mountCgroups(layout)
	if err == nil {
		fmt.Println("ready")
		// It is in the way of nothing but its end.
		err = unix.Exec("/bin/sleep", []string{"sleep", "infinity"}, nil)
	}
	fmt.Fprintf(os.Stderr, "node: %v\n", err)
	os.Exit(125)
}

// mountCgroups gives this thread a cgroup namespace, mounts at /sys/fs/cgroup what
// is in it and nothing else, and goes to init.scope, as systemd does.
func mountCgroups(layout string) error {
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("cgroup namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("mounts of the machine: %w", err)
	}
	path := "/sys/fs/cgroup"
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("cgroups of the machine: %w", err)
	}
	if layout == hybrid {
		if err := unix.Mount("tmpfs", path, "tmpfs", 0, ""); err != nil {
			return fmt.Errorf("mount of %s: %w", path, err)
		}
		path += "/unified"
		if err := os.Mkdir(path, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("cgroup2", path, "cgroup2", 0, ""); err != nil {
		return fmt.Errorf("mount of %s: %w", path, err)
	}

	return os.WriteFile(filepath.Join(path, "init.scope/cgroup.procs"), []byte("0"), 0)
}

// enter makes this thread one of the node, with mounts of its own.
func (n cgroupNode) enter() error {
	if n.PID == 0 {
		return nil
	}
	// Threads that share a root and a working folder cannot change mounts.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("folders of this thread: %w", err)
	}
	var files []*os.File
	for _, name := range []string{"cgroup", "mnt"} {
		file, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", n.PID, name))
		if err != nil {
			return fmt.Errorf("namespace of the node: %w", err)
		}
		defer file.Close()
		files = append(files, file)
	}
	for _, file := range files {
		if err := unix.Setns(int(file.Fd()), 0); err != nil {
			return fmt.Errorf("namespace of the node: %s: %w", file.Name(), err)
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}

	return nil
}

// attaches reports whether the container would attach programs to a cgroup.
func (spec containerSpec) attaches() bool { return slices.Contains(spec.Args, "agent") }

// refuseRootOfCgroup2 returns an error if a mount shows the machine's root of
// cgroup2: an agent would attach to it, and to all that runs on this machine.
func refuseRootOfCgroup2() error {
	// The mounts of this thread: the process has its old ones until this thread becomes it.
	text, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		mount, kind, _ := strings.Cut(line, " - ")
		if !strings.HasPrefix(kind, "cgroup2 ") {
			continue
		}
		path := strings.Fields(mount)[4]
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if stat.Ino == 1 {
			return fmt.Errorf("%s is the machine's root of cgroup2: no agent of a test is started", path)
		}
	}

	return nil
}

// testCgroups checks that the agent takes the widest cgroup that its mounts show, and reports
// what that is. TestPod has a node with a cgroup namespace and the unified layout.
func testCgroups(t *testing.T, k *kubelet) {
	t.Run("hybrid", func(t *testing.T) {
		m := *k.machine
		m.cgroups = mustCgroups(t, hybrid)
		k := &kubelet{machine: &m, apiServer: k.apiServer}
		spec := k.mustSpec(t)
		agent := k.mustRun(t, spec)
		t.Cleanup(func() { k.mustExec(t, spec, "cleanup") })
		k.mustBeReady(t, agent)
		k.mustReportNotCovered(t, agent, spec, "/host/cgroup/unified", "/", "of the node, which are not translated")
		ip := k.mustService(t, "hybrid", k.node.Pods[1]) + ":80"
		mustReach(t, lab.MustCaller(t, k.node.Pods[0].Namespace, k.cgroups.others), "tcp", ip, k.node.Pods[1])
		mustReach(t, lab.MustCaller(t, k.node.Namespace, k.cgroups.others), "tcp", ip, k.node.Pods[1])
		agent.mustStop(t)
	})
	t.Run("only the container's own is mounted", func(t *testing.T) {
		spec := k.mustSpec(t)
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m mount) bool { return m.To == "/host/cgroup" })
		agent := k.mustRun(t, spec)
		t.Cleanup(func() { k.mustExec(t, spec, "cleanup") })
		k.mustBeReady(t, agent)
		k.mustReportNotCovered(t, agent, spec, "/sys/fs/cgroup", "/", "of the node, which are not translated")
		ip := k.mustService(t, "own", k.node.Pods[1]) + ":80"
		mustReach(t, lab.MustCaller(t, k.node.Namespace, k.cgroups.agent), "tcp", ip, k.node.Pods[1])
		mustReach(t, lab.MustCaller(t, k.node.Pods[0].Namespace, k.cgroups.others), "tcp", ip, k.node.Pods[1])
		node := lab.MustCaller(t, k.node.Namespace, k.cgroups.others)
		if reply, err := node.Exchange(lab.Exchange{Network: "tcp", Address: ip, Timeout: time.Second}); err == nil {
			t.Errorf("a socket of the node is translated: %s", reply.Text)
		}
		agent.mustStop(t)
	})
	t.Run("no agent of a test attaches to the machine's cgroup", func(t *testing.T) {
		cgroup, err := lab.CgroupRoot()
		lab.Must(t, err)
		spec := k.mustSpec(t)
		spec.Node = cgroupNode{} // this machine
		mustMount(t, spec, "/host/cgroup").From = cgroup
		out, code := k.mustExec(t, spec, "agent", "--version")
		if code != 125 || !strings.Contains(out, "/host/cgroup is the machine's root of cgroup2") {
			t.Errorf("a container with it is started: exit code %d: %s", code, out)
		}
	})
	t.Run("none is mounted", func(t *testing.T) {
		spec := k.mustSpec(t)
		spec.Node.Hybrid = true // nothing at /sys/fs/cgroup
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m mount) bool { return m.To == "/host/cgroup" })
		agent := k.mustRun(t, spec)
		lab.EventuallyIn(t, waitTimeout, "the agent ends", agent.ended)
		if out := agent.log.String(); !strings.Contains(out, "--cgroup-root is not set: no cgroup2 file system is mounted") {
			t.Errorf("the agent ended with %v: %s", agent.err, out)
		}
	})
}

// mustReportNotCovered checks that the log and the status name the cgroup, where it
// is from the root of the agent's cgroup namespace, and which sockets are not those
// of processes in it.
func (k *kubelet) mustReportNotCovered(t *testing.T, agent *container, spec containerSpec, path, relative, end string) {
	t.Helper()
	var said string
	for line := range strings.Lines(agent.log.String()) {
		if strings.Contains(line, "no mount shows the root of cgroup2") {
			said += line
		}
	}
	for _, want := range []string{"level=WARN ", " cgroupRoot=" + path + " ", " relative=" + relative + " ", "notCovered=", end + "\"\n"} {
		if !strings.Contains(said, want) {
			t.Errorf("the log does not say %q of the cgroup: %q", want, said)
		}
	}
	out, code := k.mustExec(t, spec, "status")
	for _, want := range []string{" attached to " + path + ", effective\n", "not covered: sockets of processes outside of this cgroup", end + "\n"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("sluice status: exit code %d, want %q in: %s", code, want, out)
		}
	}
}
