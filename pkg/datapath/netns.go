package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrNetnsNotFound is returned when a socket's network namespace cannot be entered:
// it has no name in this mount namespace, and no process whose namespace this process
// may open, which takes CAP_SYS_PTRACE.
var ErrNetnsNotFound = errors.New("network namespace not found (the agent needs the host's /run/netns, or its /proc and CAP_SYS_PTRACE)")

// netnsPaths returns the paths of every network namespace that has a name or a
// process, by inode number. Names come first, since processes may end.
func netnsPaths() (map[uint32][]string, error) {
	named, err := filepath.Glob("/run/netns/*")
	if err != nil {
		return nil, fmt.Errorf("named network namespaces: %w", err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return nil, fmt.Errorf("network namespaces of processes: %w", err)
	}
	paths := make(map[uint32][]string)
	for _, path := range slices.Concat(named, processes) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil { // the process may be gone
			paths[uint32(stat.Ino)] = append(paths[uint32(stat.Ino)], path)
		}
	}

	return paths, nil
}

// inNetns runs f in another network namespace, which has one of these paths. If the
// thread cannot return to its own namespace, it ends with the goroutine.
func inNetns(paths []string, f func() error) error {
	target, err := openFirst(paths)
	if err != nil {
		return err
	}
	defer target.Close()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return fmt.Errorf("network namespace of this thread: %w", err)
	}
	defer home.Close()

	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("setns: %w", err)

			return
		}
		err := f()
		back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET)
		if back == nil {
			runtime.UnlockOSThread()
		}
		done <- errors.Join(err, back)
	}()

	return <-done
}

// openFirst opens the first path that still exists.
func openFirst(paths []string) (*os.File, error) {
	for _, path := range paths {
		if f, err := os.Open(path); err == nil {
			return f, nil
		}
	}

	return nil, ErrNetnsNotFound
}
