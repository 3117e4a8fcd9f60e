package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// namespacesOfProcesses matches the network namespaces of all processes.
const namespacesOfProcesses = "/proc/[0-9]*/ns/net"

// EachNamespace visits the network namespaces that have a name or a process, that of the calling thread included,
// until visit returns true or an error. It leaves out those that this process may not open, which takes
// CAP_SYS_PTRACE.
func EachNamespace(visit func(inode uint64, ns netns.NsHandle) (done bool, err error)) error {
	seen := make(map[uint64]bool)
	for _, pattern := range []string{"/run/netns/*", namespacesOfProcesses} { // names first: processes may end
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, path := range paths {
			inode, err := inodeOf(path)
			if err != nil || seen[inode] {
				continue // the process has ended, or it is another one of the same
			}
			ns, err := netns.GetFromPath(path)
			if err != nil {
				continue
			}
			// A name is an empty file while it is made, and while it is removed.
			if kind, err := unix.IoctlRetInt(int(ns), unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
				ns.Close()

				continue
			}
			seen[inode] = true
			done, err := visit(inode, ns)
			if err := errors.Join(err, ns.Close()); err != nil {
				return fmt.Errorf("network namespace %s: %w", path, err)
			}
			if done {
				return nil
			}
		}
	}

	return nil
}

func inodeOf(path string) (uint64, error) {
	var stat unix.Stat_t
	err := unix.Stat(path, &stat)

	return stat.Ino, err
}

// NetnsInode returns the inode of the calling thread's network namespace.
func NetnsInode() (uint64, error) { return inodeOf("/proc/thread-self/ns/net") }

// InNamespace runs f in a network namespace, on a thread of its own.
func InNamespace(ns netns.NsHandle, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter the network namespace: %w", err)

			return
		}
		done <- f()
	}()

	return <-done
}

// NetnsCookie returns the cookie of the calling thread's network namespace, or 0 before Linux 5.14.
func NetnsCookie() (uint64, error) {
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket for the namespace cookie: %w", err)
	}
	defer unix.Close(socket)
	cookie, err := unix.GetsockoptUint64(socket, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("namespace cookie: %w", err)
	}

	return cookie, nil
}

// Complete repeats a dump of netlink that a change has interrupted: it may lack some entries, or the kernel has
// refused it (EAGAIN, legacy iptables).
func Complete[T any](ask func() (T, error)) (T, error) {
	const tries = 10
	listed, err := ask()
	for i := 1; i < tries && (errors.Is(err, netlink.ErrDumpInterrupted) || errors.Is(err, unix.EAGAIN)); i++ {
		listed, err = ask()
	}

	return listed, err
}
