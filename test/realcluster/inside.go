package realcluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// inside is what the first process of a node needs to know.
type inside struct {
	Name       string
	Files      string   // the folder of the node
	Cgroup     string   // the node's cgroup of v2, in which the process is
	Cgroups    string   // where the machine mounts cgroups
	Binaries   string   // the folder of kubelet, containerd and their tools
	Kubeconfig string   // of the kubelet
	Address    string   // the node's addresses, for the kubelet
	Images     []string // archives to import
}

// insideVariable holds an [inside] for this executable when it becomes a node.
const insideVariable = "SLUICE_REALCLUSTER_NODE"

// Main lets a cluster run this executable a second time, as the first process of a
// node. It is called first in TestMain or in main, before [lab.Main]; in such a second
// run it does not return.
func Main() {
	text := os.Getenv(insideVariable)
	if text == "" {
		return
	}
	runtime.LockOSThread() // namespaces are a thread's
	var node inside
	err := json.Unmarshal([]byte(text), &node)
	if err == nil {
		err = node.run()
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", node.Name, err)
	os.Exit(1)
}

// run is the life of a node: its own view of the machine, containerd, the images, the
// kubelet. It returns when one of the two has ended, and all processes of the node
// end with this one, which is the first in its PID namespace.
func (n inside) run() error {
	if err := n.enterCgroups(); err != nil {
		return fmt.Errorf("cgroups: %w", err)
	}
	if err := n.mountAll(); err != nil {
		return fmt.Errorf("mounts: %w", err)
	}
	if err := unix.Sethostname([]byte(n.Name)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	os.Setenv("PATH", n.Binaries+":/usr/sbin:/usr/bin:/sbin:/bin")
	os.Unsetenv(insideVariable)

	containerd, err := n.start("containerd", "containerd", "--config="+filepath.Join(n.Files, "containerd.toml"))
	if err != nil {
		return err
	}
	deadline := time.Now().Add(startTimeout)
	for n.complete("ctr", "version") != nil {
		if time.Now().After(deadline) {
			return fmt.Errorf("containerd does not answer after %v", startTimeout)
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, archive := range n.Images {
		if err := n.complete("ctr", "--namespace=k8s.io", "images", "import", archive); err != nil {
			return err
		}
	}
	kubelet, err := n.start("kubelet", "kubelet", "--config="+filepath.Join(n.Files, "kubelet.yaml"),
		"--kubeconfig="+n.Kubeconfig, "--hostname-override="+n.Name, "--node-ip="+n.Address)
	if err != nil {
		return err
	}
	for {
		switch pid, status, err := reap(); {
		case err != nil:
			return err
		case pid == containerd:
			return fmt.Errorf("containerd ended with status %d", status.ExitStatus())
		case pid == kubelet:
			return fmt.Errorf("kubelet ended with status %d", status.ExitStatus())
		}
	}
}

// start starts a program, which logs to a file of its name.
func (n inside) start(name string, argv ...string) (pid int, err error) {
	log, err := os.OpenFile(filepath.Join(n.Files, name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer log.Close()
	process, err := os.StartProcess(filepath.Join(n.Binaries, argv[0]), argv, &os.ProcAttr{
		Files: []*os.File{nil, log, log}, Env: os.Environ(),
	})
	if err != nil {
		return 0, err
	}
	pid = process.Pid // which Release takes away

	return pid, process.Release()
}

// complete runs a program to its end.
func (n inside) complete(argv ...string) error {
	want, err := n.start(argv[0], argv...)
	if err != nil {
		return err
	}
	for {
		pid, status, err := reap()
		if err != nil {
			return err
		}
		if pid == want && status.ExitStatus() != 0 {
			return fmt.Errorf("%s: status %d", strings.Join(argv, " "), status.ExitStatus())
		}
		if pid == want {
			return nil
		}
	}
}

// reap waits for the end of any process: orphans of the node are children of its first
// process. So it is called by one goroutine, and nothing else waits.
func reap() (pid int, status unix.WaitStatus, err error) {
	for {
		pid, err = unix.Wait4(-1, &status, 0, nil)
		if !errors.Is(err, unix.EINTR) {
			return pid, status, err
		}
	}
}

// enterCgroups gives the node cgroups of its own, in the layout that the machine has,
// of which a cgroup namespace makes roots.
func (n inside) enterCgroups() error {
	for _, v1 := range hierarchies(n.Cgroups) {
		folder := filepath.Join(n.Cgroups, v1, filepath.Base(n.Cgroup))
		if err := os.Mkdir(folder, 0o755); err != nil {
			return err
		}
		if v1 == "cpu" { // whose default is the share of one process
			pods := filepath.Join(folder, "k8s.io") // the parent that containerd gives them
			if err := os.Mkdir(pods, 0o755); err != nil {
				return err
			}
			for _, cgroup := range []string{folder, pods} {
				if err := os.WriteFile(filepath.Join(cgroup, "cpu.shares"), []byte("20480"), 0); err != nil {
					return err
				}
			}
		}
		if v1 == "cpuset" { // empty ones take no process
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				text, err := os.ReadFile(filepath.Join(n.Cgroups, v1, file))
				if err == nil {
					err = os.WriteFile(filepath.Join(folder, file), text, 0)
				}
				if err != nil {
					return err
				}
			}
		}
		if err := os.WriteFile(filepath.Join(folder, "cgroup.procs"), []byte("0"), 0); err != nil {
			return err
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return err
	}
	// A root with controllers has no processes.
	init := filepath.Join(n.Cgroup, "init.scope")
	if err := os.Mkdir(init, 0o755); err != nil {
		return err
	}

	return os.WriteFile(filepath.Join(init, "cgroup.procs"), []byte("0"), 0)
}

// mountAll gives the node its own /proc, /sys, /run, /var/lib and /var/log; all other
// files are the machine's. Mounts of the machine are seen here, those of the node not
// there. Of the settings that a kubelet makes, which would be those of the whole
// machine, the node has files.
func (n inside) mountAll() error {
	v1 := hierarchies(n.Cgroups)
	steps := []mount{
		{flags: unix.MS_REC | unix.MS_SLAVE, to: "/"},
		{flags: unix.MS_REC | unix.MS_SHARED, to: "/"}, // containers see mounts of volumes
		{from: "proc", to: "/proc", kind: "proc"},
		{from: "sysfs", to: "/sys", kind: "sysfs"},
		{from: "bpf", to: "/sys/fs/bpf", kind: "bpf"},
		{from: "tmpfs", to: "/run", kind: "tmpfs"},
		{from: filepath.Join(n.Files, "lib"), to: "/var/lib", flags: unix.MS_BIND},
		{from: filepath.Join(n.Files, "log"), to: "/var/log", flags: unix.MS_BIND},
	}
	if len(v1) == 0 {
		steps = append(steps, mount{from: "cgroup2", to: "/sys/fs/cgroup", kind: "cgroup2"})
	} else {
		steps = append(steps,
			mount{from: "tmpfs", to: "/sys/fs/cgroup", kind: "tmpfs"},
			mount{from: "cgroup2", to: "/sys/fs/cgroup/unified", kind: "cgroup2"})
	}
	for _, name := range v1 {
		options := name
		if name == "systemd" {
			options = "none,name=systemd"
		}
		steps = append(steps, mount{from: "cgroup", to: filepath.Join("/sys/fs/cgroup", name), kind: "cgroup", options: options})
	}
	for name, value := range kubeletSettings {
		file := filepath.Join(n.Files, filepath.Base(name))
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
			return err
		}
		steps = append(steps, mount{from: file, to: filepath.Join("/proc/sys", name), flags: unix.MS_BIND})
	}
	for _, m := range steps {
		if err := m.do(); err != nil {
			return fmt.Errorf("%s: %w", m.to, err)
		}
	}

	return nil
}

// kubeletSettings are those that a kubelet writes unless they are so.
var kubeletSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

type mount struct {
	from, to, kind string
	flags          uintptr
	options        string
}

func (m mount) do() error {
	if m.kind != "" {
		if err := os.MkdirAll(m.to, 0o755); err != nil {
			return err
		}
	}

	return unix.Mount(m.from, m.to, m.kind, m.flags, m.options)
}
