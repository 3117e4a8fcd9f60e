package datapath

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// pinWatch reports that pins may be missing: something was removed from their folders, or a file system was mounted or
// unmounted. The kernel reports the latter for the process' own mounts, and not for a folder.
type pinWatch struct {
	// changed receives after a change. One that is not received yet stands for all that follow.
	changed chan struct{}

	folders *fsnotify.Watcher
	mounts  *os.File
	wake    *os.File // ends the wait for mounts when it is closed
	waiting sync.WaitGroup
}

// newPinWatch begins to watch mounts. The caller closes it.
func newPinWatch() (*pinWatch, error) {
	folders, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch of folders: %w", err)
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch of mounts: %w", err), folders.Close())
	}
	end, wake, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("watch of mounts: %w", err), mounts.Close(), folders.Close())
	}
	w := &pinWatch{changed: make(chan struct{}, 1), folders: folders, mounts: mounts, wake: wake}
	w.waiting.Go(func() {
		defer end.Close()
		w.waitForMounts(int(end.Fd()))
	})
	w.waiting.Go(w.waitForFolders)

	return w, nil
}

// follow watches the folders of these pins, those that were made again as well. One that is missing is not followed: what
// is above it, or a mount, shows that it went.
func (w *pinWatch) follow(pins []string) {
	var folders []string
	for _, pin := range pins {
		folders = append(folders, filepath.Dir(pin))
	}
	slices.Sort(folders)
	for _, folder := range slices.Compact(folders) {
		_ = w.folders.Add(folder) // the next check finds what this one would have shown
	}
}

func (w *pinWatch) waitForFolders() {
	for {
		select {
		case event, open := <-w.folders.Events:
			if !open {
				return
			}
			if event.Op.Has(fsnotify.Remove) || event.Op.Has(fsnotify.Rename) {
				w.report()
			}
		case _, open := <-w.folders.Errors: // events were lost, so something has changed
			if !open {
				return
			}
			w.report()
		}
	}
}

// waitForMounts waits for changes of mounts until the other end of end is closed.
func (w *pinWatch) waitForMounts(end int) {
	for {
		of := []unix.PollFd{{Fd: int32(w.mounts.Fd()), Events: unix.POLLPRI}, {Fd: int32(end)}}
		_, err := unix.Poll(of, -1)
		switch {
		case err != nil && !errors.Is(err, unix.EINTR) || of[1].Revents != 0:
			return
		case of[0].Revents != 0:
			w.report()
		}
	}
}

func (w *pinWatch) report() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// close ends the watch.
func (w *pinWatch) close() error {
	err := errors.Join(w.wake.Close(), w.folders.Close())
	w.waiting.Wait()

	return errors.Join(err, w.mounts.Close())
}

// watchPins is a pinWatch for the time of ctx, whose channel of changes it returns. If there can be none, which is logged,
// nothing comes from the channel.
func (m *HookMonitor) watchPins(ctx context.Context) (changed <-chan struct{}, follow func()) {
	w, err := newPinWatch()
	if err != nil {
		m.cfg.Log.Warn("lost pins are noticed by the next check only", "interval", m.cfg.Interval, "error", err)

		return nil, func() {}
	}
	context.AfterFunc(ctx, func() { _ = w.close() }) // the process ends, or a test

	return w.changed, func() {
		w.follow(m.datapath.pins())
		if m.Unpinned() == nil && len(m.datapath.MissingPins()) > 0 { // lost before their folders were watched
			w.report()
		}
	}
}
