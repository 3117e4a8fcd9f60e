package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// DefaultBPFRoot is the folder of the pins if bpffs is mounted in its usual place.
const DefaultBPFRoot = "/sys/fs/bpf/sluice"

// FindBPFRoot returns the folder of the pins: [DefaultBPFRoot] if that is on bpffs, or
// else the folder of that name in the first bpffs that is mounted. AppArmor does not
// let a container write below /sys, so it has its node's bpffs elsewhere.
func FindBPFRoot() string {
	if checkBPFFS(DefaultBPFRoot) == nil {
		return DefaultBPFRoot
	}
	mounts, err := mountPoints("bpf")
	if err != nil {
		return DefaultBPFRoot // the agent reports why it cannot be used
	}
	for _, mount := range mounts {
		root := filepath.Join(mount.Mountpoint, filepath.Base(DefaultBPFRoot))
		if checkBPFFS(root) == nil {
			return root
		}
	}

	return DefaultBPFRoot
}

// MountBPFFS mounts bpffs at the parent folder of bpfRoot, unless that is on bpffs.
// Mounting takes full privileges, which the agent does not need otherwise.
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

// mountPoints returns the mounts of a type of file system in the order of mountinfo, without those that another mount
// hides. In a cgroup file system the root of a mount is a path from the root of this process' cgroup namespace.
func mountPoints(kind string) ([]*mountinfo.Info, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter(kind))
	if err != nil {
		return nil, fmt.Errorf("mounts: %w", err)
	}

	return slices.DeleteFunc(mounts, func(mount *mountinfo.Info) bool {
		id, err := mountID(mount.Mountpoint)

		return err != nil || id != mount.ID
	}), nil
}

// mountID returns the id of the mount that a path is in (Linux 5.8).
func mountID(path string) (int, error) {
	var stat unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_MNT_ID, &stat); err != nil {
		return 0, fmt.Errorf("mount of %s: %w", path, err)
	}

	return int(stat.Mnt_id), nil
}

// CheckBPFRoot returns an error that names the folder unless it is on bpffs, or can be
// created there.
func CheckBPFRoot(bpfRoot string) error {
	if err := checkBPFFS(bpfRoot); err != nil {
		return fmt.Errorf("bpf root %q: %w", bpfRoot, err)
	}

	return nil
}

// checkBPFFS returns an error unless path is on bpffs. It need not exist if its parent does.
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
