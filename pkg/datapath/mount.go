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

// DefaultBPFRoot is where the pins are unless the configuration says otherwise.
const DefaultBPFRoot = "/sys/fs/bpf/sluice"

// ErrNoCgroup2 is returned when no cgroup2 file system is mounted.
var ErrNoCgroup2 = errors.New("no mount shows the root of cgroup2 (mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's)")

// rootCgroupID is the id of the root of cgroup2, whatever a namespace shows.
const rootCgroupID = 1

// FindCgroupRoot returns the mount point of the cgroup2 file system: the
// first mount that shows its root, and not what a cgroup namespace calls so.
// The error wraps [ErrNoCgroup2] if there is none.
func FindCgroupRoot() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("mounts: %w", err)
	}
	defer f.Close()

	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// ID parent major:minor root mountpoint options … - type source …
		mount, kind, _ := strings.Cut(lines.Text(), " - ")
		fields := strings.Fields(mount)
		if !strings.HasPrefix(kind, "cgroup2 ") || len(fields) < 5 || fields[3] != "/" {
			continue
		}
		if id, err := cgroupID(fields[4]); err == nil && id == rootCgroupID {
			return fields[4], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("mounts: %w", err)
	}

	return "", ErrNoCgroup2
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
