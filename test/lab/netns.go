package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Where iproute2 keeps the names of network namespaces.
const netnsDir = "/run/netns"

// newNamedNetns makes a network namespace and gives it a name the way
// `ip netns add` does.
func newNamedNetns(name string) error {
	if err := shareNetnsDir(); err != nil {
		return err
	}
	path := filepath.Join(netnsDir, name)
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(file.Close(), mountNewNetns(path)); err != nil {
		return errors.Join(err, os.Remove(path))
	}

	return nil
}

// shareNetnsDir makes the directory a shared mount point, as `ip netns add`
// does. Were it left to a later `ip netns add`, that would mount the directory
// over ours, and our names could not be removed any more. The lock is
// iproute2's own.
func shareNetnsDir() error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	dir, err := os.Open(netnsDir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", netnsDir, err)
	}

	err = unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) {
		return err
	}
	// EINVAL: it is not a mount point yet.
	if err := unix.Mount(netnsDir, netnsDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind mount %s: %w", netnsDir, err)
	}

	return unix.Mount("", netnsDir, "none", unix.MS_SHARED|unix.MS_REC, "")
}

// mountNewNetns makes a network namespace and mounts it at path. The goroutine
// stays locked to its thread, which then ends with it, when the thread cannot
// return to its own namespace.
func mountNewNetns(path string) error {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("unshare: %w", err)
	}
	mounted := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, "")
	if err := netns.Set(home); err != nil {
		return errors.Join(mounted, err)
	}
	runtime.UnlockOSThread()

	return mounted
}

// removeNetns takes a namespace's name away. Removing an absent name is not an
// error.
func removeNetns(name string) error {
	path := filepath.Join(netnsDir, name)
	err := unix.Unmount(path, unix.MNT_DETACH)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		err = nil // not mounted
	}
	if removed := os.Remove(path); removed != nil && !errors.Is(removed, fs.ErrNotExist) {
		err = errors.Join(err, removed)
	}

	return err
}
