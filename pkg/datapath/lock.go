package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
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
	goes    bool     // with the lock, as it is for that only
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
	if err := CheckBPFRoot(l.bpfRoot); err != nil {
		return err
	}
	for {
		// The folder may have been removed before it was locked, by a cleanup that
		// had the lock. Then another process can make and lock a folder of the same
		// name, so only the folder that the path leads to counts.
		if l.folder != nil {
			locked, err := l.folder.Stat()
			if err != nil {
				return fmt.Errorf("bpf root: %w", err)
			}
			now, err := os.Stat(l.bpfRoot)
			if err == nil && os.SameFile(locked, now) {
				return nil
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("bpf root: %w", err)
			}
		}
		err := os.Mkdir(l.bpfRoot, 0o700)
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
		if err := LockFile(folder); err != nil {
			return errors.Join(fmt.Errorf("bpf root %q: %w", l.bpfRoot, err), folder.Close())
		}
		if err := l.Release(); err != nil {
			return errors.Join(err, folder.Close())
		}
		l.folder = folder
	}
}

// Release releases the lock. Releasing one that is not held is not an error.
func (l *MapsLock) Release() error {
	if l.folder == nil {
		return nil
	}
	folder := l.folder
	l.folder = nil
	if !l.goes {
		return folder.Close()
	}
	locked, err := folder.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("bpf root: %w", err), folder.Close())
	}
	if now, err := os.Stat(l.bpfRoot); err == nil && os.SameFile(locked, now) {
		return errors.Join(os.Remove(l.bpfRoot), folder.Close())
	}

	return folder.Close() // it has gone with the pins
}

// cleanupDir is the folder that cleanups lock. It has no pins.
func cleanupDir(bpfRoot string) string { return filepath.Join(bpfRoot, "cleanup") }

// LockCleanup takes the lock that one cleanup of a bpf root has at a time, also beside an agent,
// which has the [MapsLock]. Only what may write below the bpf root can take it. Where there is no bpf
// root there is nothing to lock, because no agent runs. The error wraps [ErrRunning] if another
// process has the lock. The caller releases it, which leaves nothing.
func LockCleanup(bpfRoot string) (*MapsLock, error) {
	if _, err := os.Stat(bpfRoot); errors.Is(err, fs.ErrNotExist) {
		return &MapsLock{}, nil
	}
	if err := CheckBPFRoot(bpfRoot); err != nil {
		return nil, err
	}

	l := &MapsLock{bpfRoot: cleanupDir(bpfRoot), goes: true}
	if err := l.Renew(); err != nil {
		return nil, errors.Join(err, l.Release())
	}

	return l, nil
}

// LockFile locks an open file or folder until it is closed. The error is [ErrRunning] if
// another process has it locked.
func LockFile(f *os.File) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return ErrRunning
	}
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}

	return nil
}
