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

// ErrNetnsNotFound is returned when a socket's network namespace cannot be
// entered: no process that we can see is in it.
var ErrNetnsNotFound = errors.New("network namespace not found (the agent needs the host's /proc)")

// netnsPaths returns a path for every network namespace that a process is in
// or that has a name, by inode number.
func netnsPaths() (map[uint32]string, error) {
	processes, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return nil, fmt.Errorf("network namespaces of processes: %w", err)
	}
	named, err := filepath.Glob("/run/netns/*")
	if err != nil {
		return nil, fmt.Errorf("named network namespaces: %w", err)
	}
	paths := make(map[uint32]string)
	for _, path := range slices.Concat(processes, named) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil { // the process may be gone
			paths[uint32(stat.Ino)] = path
		}
	}

	return paths, nil
}

// inNetns runs f on a thread in another network namespace. A thread that
// cannot come back is not used again.
func inNetns(path string, f func() error) error {
	target, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNetnsNotFound, err)
	}
	defer target.Close()

	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("setns: %w", err)

			return
		}
		done <- f()
	}()

	return <-done
}
