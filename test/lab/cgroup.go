package lab

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How long the processes of a cgroup may take to die.
const cgroupTimeout = 5 * time.Second

// CgroupRoot returns where cgroup v2 is mounted: /sys/fs/cgroup, or
// /sys/fs/cgroup/unified where v1 has the upper place. Returns an error wrapping
// fs.ErrNotExist if it is mounted nowhere.
func CgroupRoot() (string, error) {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer file.Close()

	lines := bufio.NewScanner(file)
	for lines.Scan() {
		// 41 31 0:38 ROOT MOUNTPOINT rw,relatime [optional…] - TYPE …
		mount, kind, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if strings.HasPrefix(kind, "cgroup2 ") && len(fields) > 4 && fields[3] == "/" {
			return fields[4], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", err
	}

	return "", fmt.Errorf("mount of cgroup v2: %w", fs.ErrNotExist)
}

// Cgroup is a cgroup v2 of the lab.
type Cgroup struct {
	path string
	dir  *os.File
}

// NewCgroup makes a cgroup under the root. What is a word for people, part of
// its name. The caller closes it.
func NewCgroup(what string) (*Cgroup, error) {
	prepare()

	root, err := CgroupRoot()
	if err != nil {
		return nil, err
	}

	return makeCgroup(filepath.Join(root, newName(what)))
}

// Child makes a cgroup inside this one. It goes when its parent is closed, if
// not before.
func (cg *Cgroup) Child(name string) (*Cgroup, error) {
	return makeCgroup(filepath.Join(cg.path, name))
}

func makeCgroup(path string) (*Cgroup, error) {
	if err := os.Mkdir(path, 0o755); err != nil {
		return nil, fmt.Errorf("new cgroup: %w", err)
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("new cgroup: %w", err), os.Remove(path))
	}

	return &Cgroup{path: path, dir: dir}, nil
}

// Path is the cgroup's directory.
func (cg *Cgroup) Path() string { return cg.path }

// ID is the kernel's number for the cgroup, as bpf_get_current_cgroup_id
// returns it.
func (cg *Cgroup) ID() (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(cg.path, &stat); err != nil {
		return 0, fmt.Errorf("id of cgroup %s: %w", cg.path, err)
	}

	return stat.Ino, nil
}

// Processes lists the processes in the cgroup, without those of its children.
func (cg *Cgroup) Processes() ([]int, error) { return cgroupProcesses(cg.path) }

// Close kills what is inside, children included, and removes the cgroup. It
// waits for both. Closing twice is not an error.
func (cg *Cgroup) Close() error {
	if cg.dir == nil {
		return nil
	}
	err := errors.Join(cg.dir.Close(), removeCgroup(cg.path))
	cg.dir = nil

	return err
}

// removeCgroup kills and removes the cgroup at path with everything below it.
// Removing an absent one is not an error.
func removeCgroup(path string) error {
	for deadline := time.Now().Add(cgroupTimeout); ; time.Sleep(time.Millisecond) {
		err := errors.Join(killCgroup(path), removeEmptyCgroups(path))
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w", path, err)
		}
	}
}

func removeEmptyCgroups(path string) error {
	var dirs []string
	err := filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		return ignoreGone(err)
	})
	for _, dir := range slices.Backward(dirs) {
		err = errors.Join(err, ignoreGone(unix.Rmdir(dir)))
	}

	return err
}

// writeExisting writes to a file that it does not create: of one that is not
// there, cgroupfs would not permit its creation.
func writeExisting(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)

	return errors.Join(err, f.Close())
}

// killCgroup ends every process below path.
func killCgroup(path string) error {
	err := writeExisting(filepath.Join(path, "cgroup.kill"), "1")
	if !errors.Is(err, fs.ErrNotExist) {
		return ignoreGone(err)
	}
	// Before kernel 5.14 there is no such file; neither is there if the cgroup
	// has gone.
	return filepath.WalkDir(path, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return ignoreGone(err)
		}
		pids, err := cgroupProcesses(path)
		for _, pid := range pids {
			if killed := unix.Kill(pid, unix.SIGKILL); !errors.Is(killed, unix.ESRCH) {
				err = errors.Join(err, killed)
			}
		}
		return ignoreGone(err)
	})
}

func cgroupProcesses(path string) ([]int, error) {
	text, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, field := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("process of cgroup %s: %w", path, err)
		}
		if pid > 0 { // 0: of another PID namespace
			pids = append(pids, pid)
		}
	}

	return pids, nil
}

// ignoreGone drops the errors of a cgroup that another process has removed.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}

	return err
}

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
