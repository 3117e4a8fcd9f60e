package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrRunning is returned when an agent runs already: two would give out the
// same ids.
var ErrRunning = errors.New("another agent is running")

// Lock makes sure that no agent runs with this socket, and none starts until
// release is called. The error wraps [ErrRunning] if one runs.
func Lock(socket string) (release func() error, err error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return nil, fmt.Errorf("socket directory: %w", err)
	}
	// The file stays: one that is removed while somebody waits for it locks
	// nobody out. The kernel unlocks it when its process ends.
	f, err := os.OpenFile(socket+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrRunning
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
	}

	return f.Close, nil
}
