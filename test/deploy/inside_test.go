package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// becomeContainer turns this process into the container of the spec in its environment, and
// runs that. It returns if there is none.
func becomeContainer() {
	text := os.Getenv(specVariable)
	if text == "" {
		return
	}
	// All of what follows is of this thread, which becomes the process.
	runtime.LockOSThread()
	var spec containerSpec
	err := json.Unmarshal([]byte(text), &spec)
	if err == nil {
		err = spec.become()
	}
	fmt.Fprintf(os.Stderr, "container: %v\n", err)
	os.Exit(125)
}

func (spec containerSpec) become() error {
	if err := spec.Node.enter(); err != nil {
		return err
	}
	if !spec.Node.Hybrid {
		// Not by clone: its root would be the cgroup of the process that started this one.
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("cgroup namespace: %w", err)
		}
	}
	if err := spec.mountAll(); err != nil {
		return err
	}
	if err := spec.pivot(); err != nil {
		return err
	}
	if spec.attaches() {
		if err := refuseRootOfCgroup2(); err != nil {
			return err
		}
	}
	if held("SYS_RESOURCE") {
		if err := os.WriteFile("/proc/self/oom_score_adj", []byte(kubeletScore), 0); err != nil {
			return err
		}
	}
	if !spec.Privileged {
		if err := spec.confine(); err != nil {
			return err
		}
	}
	err := unix.Exec(spec.Args[0], spec.Args, spec.Env)

	return fmt.Errorf("%s: %w", spec.Args[0], err)
}

// confine takes away what is not granted.
func (spec containerSpec) confine() error {
	if err := spec.dropCapabilities(); err != nil {
		return err
	}
	if spec.NoNewPrivs {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no new privileges: %w", err)
		}
	}

	return restrictCalls()
}

// mountAll mounts what container runtimes do for a container without privilege,
// and then its volumes.
func (spec containerSpec) mountAll() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("mounts of the node: %w", err)
	}
	if err := unix.Mount(spec.Root, spec.Root, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("root: %w", err)
	}
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	volumes := slices.Clone(spec.Mounts)
	cgroup := "cgroup2"
	if spec.Node.Hybrid {
		cgroup = "tmpfs" // for mounts of cgroup v1, which do not matter here
	}
	if !spec.Privileged {
		volumes = append(volumes, mount{From: filepath.Join(spec.Root, "proc/sys"), To: "/proc/sys", ReadOnly: true})
	}
	for _, m := range []struct {
		to, kind string
		flags    uintptr
	}{
		{"/proc", "proc", flags},
		{"/sys", "sysfs", flags | unix.MS_RDONLY},
		{"/sys/fs/cgroup", cgroup, flags | unix.MS_RDONLY},
		{"/dev", "tmpfs", unix.MS_NOSUID},
	} {
		to, err := spec.folder(m.to)
		if err == nil {
			err = unix.Mount(m.kind, to, m.kind, m.flags, "")
		}
		if err != nil {
			return fmt.Errorf("mount of %s: %w", m.to, err)
		}
	}
	null := filepath.Join(spec.Root, "dev/null")
	if err := unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return fmt.Errorf("%s: %w", null, err)
	}
	for _, m := range volumes {
		if err := spec.bind(m); err != nil {
			return fmt.Errorf("mount of %s at %s: %w", m.From, m.To, err)
		}
	}

	return nil
}

// folder makes a folder below the root, and returns where it is.
func (spec containerSpec) folder(path string) (string, error) {
	path = filepath.Join(spec.Root, path)

	return path, os.MkdirAll(path, 0o755)
}

func (spec containerSpec) bind(m mount) error {
	to, err := spec.folder(m.To)
	if err != nil {
		return err
	}
	if err := unix.Mount(m.From, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	propagation := uintptr(unix.MS_PRIVATE)
	if m.Slave {
		propagation = unix.MS_SLAVE
	}
	if err := unix.Mount("", to, "", unix.MS_REC|propagation, ""); err != nil {
		return err
	}
	if !m.ReadOnly {
		return nil
	}

	return unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
}

// pivot leaves nothing of the node's files but what is mounted.
func (spec containerSpec) pivot() error {
	if spec.ReadOnly {
		if err := unix.Mount("", spec.Root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("read-only root: %w", err)
		}
	}
	err := unix.Chdir(spec.Root)
	if err == nil {
		err = unix.PivotRoot(".", ".")
	}
	if err == nil {
		err = unix.Unmount(".", unix.MNT_DETACH)
	}
	if err == nil {
		err = unix.Chdir("/")
	}
	if err != nil {
		return fmt.Errorf("root: %w", err)
	}

	return nil
}

// kubeletScore is the oom_score_adj of pods that are critical for their node.
const kubeletScore = "-997"

// capabilities are those that the containers here ask for.
var capabilities = map[string]uint{
	"NET_ADMIN": unix.CAP_NET_ADMIN, "SYS_ADMIN": unix.CAP_SYS_ADMIN, "SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
	"SYS_PTRACE": unix.CAP_SYS_PTRACE, "BPF": unix.CAP_BPF, "PERFMON": unix.CAP_PERFMON,
}

// held reports whether this process has a capability, and so may give it to others.
func held(name string) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		panic(err) // of a kernel without capabilities
	}
	number := capabilities[name]

	return sets[number/32].Permitted&(1<<(number%32)) != 0
}

func (spec containerSpec) dropCapabilities() error {
	var mask uint64
	for _, name := range spec.Capabilities {
		number, ok := capabilities[strings.TrimPrefix(name, "CAP_")]
		if !ok {
			return fmt.Errorf("capability %s: unknown here", name)
		}
		mask |= 1 << number
	}
	for number := uint(0); number <= unix.CAP_LAST_CAP; number++ {
		if mask&(1<<number) != 0 {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0)
		if err != nil && !errors.Is(err, unix.EINVAL) { // unknown to the kernel
			return fmt.Errorf("capability %d: %w", number, err)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	sets := [2]unix.CapUserData{}
	for i := range sets {
		word := uint32(mask >> (32 * i))
		sets[i] = unix.CapUserData{Effective: word, Permitted: word}
	}
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}

	return nil
}
