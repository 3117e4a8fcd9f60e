package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/pkg/datapath"
)

// ErrRunning is returned when another process has the lock.
var ErrRunning = errors.New("another agent is running")

// MapsLock is held by the one process that may write the maps pinned below a bpf
// root: two agents would assign the same ids, and a cleanup would remove the programs
// of a running agent. It locks the folder itself, because containers may share no
// other one: it is the same folder wherever the node's bpffs is mounted. The kernel
// releases the lock when the process ends.
type MapsLock struct {
	bpfRoot string
	folder  *os.File // open and locked; nil: none is
}

// LockMaps takes the lock of a bpf root, and makes the folder if it is missing. The
// error wraps [ErrRunning] if another process has the lock. The caller releases it.
func LockMaps(bpfRoot string) (*MapsLock, error) {
	l := &MapsLock{bpfRoot: bpfRoot}
	if err := l.Renew(); err != nil {
		return nil, errors.Join(err, l.Release())
	}

	return l, nil
}

// Renew takes the lock of the folder that is at the bpf root now, and makes it if it
// is missing. It changes nothing if that is the folder which is locked. An agent calls
// it before it restores pins, because its folder may have been removed, or another bpffs
// may be mounted there. The error wraps [ErrRunning] if another process has the lock.
func (l *MapsLock) Renew() error {
	if err := datapath.CheckBPFRoot(l.bpfRoot); err != nil {
		return err
	}
	for {
		// The folder may have been removed before it was locked, by a cleanup that
		// had the lock. Then another process can make and lock a folder of the same
		// name, so only the folder that the path leads to counts.
		locked, err := l.leadsToLocked()
		if err != nil || locked {
			return err
		}
		err = os.Mkdir(l.bpfRoot, 0o700)
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("bpf root: %w", err)
		}
		folder, err := os.OpenFile(l.bpfRoot, os.O_RDONLY|unix.O_DIRECTORY, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("bpf root: %w", err)
		}
		if err := flock(folder); err != nil {
			return errors.Join(fmt.Errorf("bpf root %q: %w", l.bpfRoot, err), folder.Close())
		}
		if err := l.Release(); err != nil {
			return errors.Join(err, folder.Close())
		}
		l.folder = folder
	}
}

// leadsToLocked reports whether the folder at the bpf root is the one that is
// locked.
func (l *MapsLock) leadsToLocked() (bool, error) {
	if l.folder == nil {
		return false, nil
	}
	locked, err := l.folder.Stat()
	if err != nil {
		return false, fmt.Errorf("bpf root: %w", err)
	}
	now, err := os.Stat(l.bpfRoot)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("bpf root: %w", err)
	}

	return os.SameFile(locked, now), nil
}

// Release releases the lock. Releasing one that is not held is not an error.
func (l *MapsLock) Release() error {
	if l.folder == nil {
		return nil
	}
	folder := l.folder
	l.folder = nil

	return folder.Close()
}

// lockSocket takes the lock of a socket, so that no other agent answers there until release
// is called: an agent that starts removes the socket that it finds. It makes the socket's
// folder if it is missing. The error wraps [ErrRunning] if another agent has the lock.
func lockSocket(socket string) (release func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return nil, fmt.Errorf("socket directory: %w", err)
	}
	// The file stays: a process that waits for a removed file would lock out no one.
	return lockFile(socket, os.O_CREATE|os.O_RDWR)
}

// LockUsedSocket takes the lock of a socket if an agent has ever used it. Cleanups take it
// beside the [MapsLock], because older builds of the agent lock nothing but their socket. The
// error wraps [ErrRunning] if an agent has the lock.
func LockUsedSocket(socket string) (release func() error, err error) {
	release, err = lockFile(socket, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return func() error { return nil }, nil
	}

	return release, err
}

func lockFile(socket string, flags int) (release func() error, err error) {
	f, err := os.OpenFile(socket+".lock", flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of the socket: %w", err)
	}
	if err := flock(f); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %q: %w", socket, err), f.Close())
	}

	return f.Close, nil
}

// flock locks an open file or folder until it is closed. The error is [ErrRunning] if
// another process has it locked.
func flock(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrRunning
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}

	return nil
}
