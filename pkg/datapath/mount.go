package datapath

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultBPFRoot is where the pins are if bpffs is mounted where everybody
// expects it.
const DefaultBPFRoot = "/sys/fs/bpf/sluice"

// FindBPFRoot returns the folder of the pins: [DefaultBPFRoot], or where that is
// not on bpffs the same in the first bpffs that is mounted. A container may not
// write below /sys (AppArmor), and so has its node's bpffs elsewhere.
func FindBPFRoot() string {
	if checkBPFFS(DefaultBPFRoot) == nil {
		return DefaultBPFRoot
	}
	found := DefaultBPFRoot // for the error that says what is missing
	_ = eachMount("bpf", func(path string) bool {
		root := filepath.Join(path, filepath.Base(DefaultBPFRoot))
		if checkBPFFS(root) != nil {
			return false
		}
		found = root

		return true
	})

	return found
}

// ErrNoCgroup2 is returned when no cgroup2 file system is mounted.
var ErrNoCgroup2 = errors.New("no mount shows the root of cgroup2 (mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's)")

// rootCgroupID is the id of the root of cgroup2, whatever a namespace shows.
const rootCgroupID = 1

// MountBPFFS mounts bpffs at the folder of bpfRoot, unless it is there. That takes
// a privilege that nothing else does.
func MountBPFFS(bpfRoot string) error {
	folder := filepath.Dir(bpfRoot)
	if checkBPFFS(folder) == nil {
		return nil
	}
	if err := unix.Mount("bpf", folder, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount of bpffs at %s: %w", folder, err)
	}

	return nil
}

// FindCgroupRoot returns the mount point of the cgroup2 file system: the
// first mount that shows its root, and not what a cgroup namespace calls so.
// The error wraps [ErrNoCgroup2] if there is none.
func FindCgroupRoot() (string, error) {
	found := ""
	err := eachMount("cgroup2", func(path string) bool {
		id, err := cgroupID(path)
		if err == nil && id == rootCgroupID && checkCgroup2(path) == nil {
			found = path
		}

		return found != ""
	})
	if err == nil && found == "" {
		err = ErrNoCgroup2
	}

	return found, err
}

// eachMount calls f with the mount points of a type of file system, until f says
// that it has seen enough. Which part of the file system each shows is not told:
// of a cgroup, mountinfo says where it is below this process' cgroup namespace.
func eachMount(kind string, f func(path string) (enough bool)) error {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("mounts: %w", err)
	}
	defer mounts.Close()

	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		// ID parent major:minor root mountpoint options … - type source …
		mount, is, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if strings.HasPrefix(is, kind+" ") && len(fields) > 4 && f(fields[4]) {
			return nil
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("mounts: %w", err)
	}

	return nil
}

func checkCgroup2(path string) error {
	if path == "" {
		return errors.New("a path is required")
	}
	magic, err := fileSystem(path)
	if err != nil {
		return err
	}
	if magic != unix.CGROUP2_SUPER_MAGIC {
		return errors.New("not on a cgroup2 file system (mount -t cgroup2 none /sys/fs/cgroup, or see /proc/mounts for where it is)")
	}

	return nil
}

// CheckBPFRoot returns an error that names the folder and what is wrong with it
// unless it is on bpffs, or can be made there.
func CheckBPFRoot(bpfRoot string) error {
	if err := checkBPFFS(bpfRoot); err != nil {
		return fmt.Errorf("bpf root %q: %w", bpfRoot, err)
	}

	return nil
}

// checkBPFFS accepts folders that do not exist yet, if their parent is on bpffs.
func checkBPFFS(path string) error {
	if path == "" {
		return errors.New("a path is required")
	}
	magic, err := fileSystem(path)
	if errors.Is(err, os.ErrNotExist) {
		magic, err = fileSystem(filepath.Dir(path))
	}
	if err != nil {
		return err
	}
	if magic != unix.BPF_FS_MAGIC {
		return errors.New("not on a bpf file system (mount -t bpf bpf /sys/fs/bpf)")
	}

	return nil
}

func fileSystem(path string) (magic int64, err error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(path, &stat); err != nil {
		return 0, fmt.Errorf("file system: %w", err)
	}

	return int64(stat.Type), nil
}
