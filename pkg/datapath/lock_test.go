package datapath

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/test/lab"
)

func mustLock(t *testing.T, bpfRoot string) *MapsLock {
	t.Helper()
	lock, err := LockMaps(bpfRoot)
	lab.Must(t, err)
	t.Cleanup(func() { lock.Release() })

	return lock
}

// mustBeLocked checks that the lock is refused, with an error that names the folder.
func mustBeLocked(t *testing.T, bpfRoot string) {
	t.Helper()
	lock, err := LockMaps(bpfRoot)
	if err == nil {
		lock.Release()
	}
	if !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), bpfRoot) {
		t.Errorf("the second lock of %s: %v, want %v with the folder's name", bpfRoot, err, ErrRunning)
	}
}

func TestMapsHaveOneLock(t *testing.T) {
	root := lab.MustBPFRoot(t)
	lock := mustLock(t, root)
	mustBeLocked(t, root)
	mustLock(t, lab.MustBPFRoot(t)) // other maps
	if err := lock.Renew(); err != nil {
		t.Errorf("the same folder again: %v", err)
	}
	mustBeLocked(t, root)
	lab.Must(t, lock.Release())
	mustLock(t, root)
}

func TestMapsLockIsOfBPFFS(t *testing.T) {
	root := filepath.Join(t.TempDir(), "sluice")
	if lock, err := LockMaps(root); err == nil || !strings.Contains(err.Error(), root) {
		t.Errorf("outside of bpffs: %v, %v, want an error that names the folder", lock, err)
	}
	if _, err := os.Stat(root); !os.IsNotExist(err) {
		t.Errorf("a folder was made: %v", err)
	}
}

// A container has the node's bpffs at a path of its own. Another bpffs has other
// maps.
func TestMapsHaveOneLockInAllContainers(t *testing.T) {
	root := lab.MustBPFRoot(t)
	mustLock(t, root)
	elsewhere, another := t.TempDir(), t.TempDir()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock: the thread ends, and its mounts with it
		for _, err := range []error{
			unix.Unshare(unix.CLONE_NEWNS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount(filepath.Dir(root), elsewhere, "", unix.MS_BIND, ""),
			unix.Mount("bpf", another, "bpf", 0, ""),
		} {
			if err != nil {
				t.Error(err)

				return
			}
		}
		mustBeLocked(t, filepath.Join(elsewhere, filepath.Base(root)))
		lock, err := LockMaps(filepath.Join(another, filepath.Base(root)))
		if err != nil {
			t.Errorf("on another bpffs: %v", err)

			return
		}
		lock.Release()
	}()
	<-done
}

// Every holder removes the folder, as a cleanup does, while the others open it. One
// of them at a time has the lock.
func TestMapsLockOfAFolderThatIsRemoved(t *testing.T) {
	root := lab.MustBPFRoot(t)
	var holders, taken atomic.Int32
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for taken.Load() < 2000 && !t.Failed() {
				lock, err := LockMaps(root)
				if errors.Is(err, ErrRunning) {
					continue
				}
				if err != nil {
					t.Error(err)

					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the lock", n)
				}
				taken.Add(1)
				runtime.Gosched()
				holders.Add(-1)
				if err := errors.Join(os.Remove(root), lock.Release()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
}

// An agent whose folder is gone locks the next one before it pins there.
func TestMapsLockIsRenewed(t *testing.T) {
	root := lab.MustBPFRoot(t)
	lock := mustLock(t, root)
	lab.Must(t, os.Remove(root))
	other := mustLock(t, root)
	if err := lock.Renew(); !errors.Is(err, ErrRunning) {
		t.Errorf("another has the new folder: %v, want %v", err, ErrRunning)
	}
	lab.Must(t, other.Release())
	lab.Must(t, lock.Renew())
	mustBeLocked(t, root)
	lab.Must(t, lock.Release())
	mustLock(t, root)
}
