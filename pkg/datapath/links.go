package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// links are the links of attached programs, open as long as this process runs. A
// link ends with its last reference. The pins make it outlive the process; that the
// process has it open as well makes it outlive the pins, which go when bpffs is
// unmounted or emptied. Any goroutine may use them.
type links struct {
	bpfRoot string

	mu   sync.Mutex
	open map[string]link.Link // by the path of the pin
}

// attach updates the link that belongs to a pin, if it is where it should be and that
// still exists. Otherwise a new link takes its place. A new link that cannot be pinned
// is attached all the same: see [links.pinAgain].
func (ls *links) attach(pin string, program *ebpf.Program, isThere func(link.Link) bool, attach func() (link.Link, error)) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()

	current := ls.open[pin]
	if current == nil {
		pinned, err := loadPinned(pin)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err == nil {
			current, ls.open[pin] = pinned, pinned
		}
	}
	if current != nil && isThere(current) {
		err := current.Update(program)
		if !errors.Is(err, unix.ENOLINK) {
			return err
		}
	}

	attached, err := attach()
	if err != nil {
		return err
	}
	ls.open[pin] = attached
	if ls.replacePin(pin, attached) != nil {
		// What may be there leads to the old link. Without, pinAgain tries again, and
		// returns why it fails.
		_ = os.Remove(pin)
	}
	if current != nil {
		err = errors.Join(detach(current), current.Close())
	}

	return err
}

// replacePin pins a link, in one step in the place of the one before. The folder of
// all pins must be there: it has a lock, which belongs to who made it.
func (ls *links) replacePin(pin string, l link.Link) error {
	if _, err := os.Stat(ls.bpfRoot); err != nil {
		return fmt.Errorf("bpf root: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	next := pin + "_next"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unfinished pin of an earlier agent: %w", err)
	}
	// The library would move the pin that it knows a link to have. It knows of none for
	// a new reference.
	fresh, err := reopen(l)
	if err != nil {
		return err
	}
	defer fresh.Close()
	if err := fresh.Pin(next); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	if err := os.Rename(next, pin); err != nil {
		return fmt.Errorf("pin link in its place: %w", err)
	}

	return nil
}

// reopen returns another reference to a link. The caller closes it.
func reopen(l link.Link) (link.Link, error) {
	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	fresh, err := link.NewFromID(info.ID)
	if err != nil {
		return nil, fmt.Errorf("link %d: %w", info.ID, err)
	}

	return fresh, nil
}

// unpinned returns the pins that are missing, sorted.
func (ls *links) unpinned() []string {
	ls.mu.Lock()
	defer ls.mu.Unlock()

	return missingFiles(slices.Sorted(maps.Keys(ls.open)))
}

// pinAgain pins the links whose pins are missing, and returns their pins.
func (ls *links) pinAgain() ([]string, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	missing := missingFiles(slices.Sorted(maps.Keys(ls.open)))
	var errs []error
	for _, pin := range missing {
		errs = append(errs, ls.replacePin(pin, ls.open[pin]))
	}

	return missing, errors.Join(errs...)
}

// missingFiles returns the files that are not there.
func missingFiles(paths []string) []string {
	return slices.DeleteFunc(paths, func(path string) bool {
		_, err := os.Lstat(path)

		return !errors.Is(err, fs.ErrNotExist)
	})
}

// get returns the link that belongs to a pin, if it is pinned or not. The error wraps
// [fs.ErrNotExist] if there is none. The caller closes it.
func (ls *links) get(pin string) (link.Link, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if l := ls.open[pin]; l != nil {
		return reopen(l)
	}

	return loadPinned(pin)
}

// loadPinned returns a pinned link. The error wraps [fs.ErrNotExist] if there is none.
// The caller closes it.
func loadPinned(pin string) (link.Link, error) {
	l, err := link.LoadPinnedLink(pin, nil)

	return l, wrap("pinned link", err)
}

// detachDevices detaches our links from the devices that keep does not want, pinned
// or not.
func (ls *links) detachDevices(keep func(index int) bool) error {
	// Together, or pinAgain would pin what is being detached.
	ls.mu.Lock()
	defer ls.mu.Unlock()
	err := detachTCX(ls.bpfRoot, keep)
	// In the reverse order of attaching, see deviceHooks.
	for _, hook := range slices.Backward(deviceHooks()) {
		for pin, l := range ls.open {
			index, notDevice := strconv.Atoi(filepath.Base(filepath.Dir(pin)))
			if notDevice == nil && filepath.Base(pin) == hook.name && !keep(index) {
				err = errors.Join(err, detach(l), l.Close())
				delete(ls.open, pin)
			}
		}
	}

	return err
}

// close closes the links. Those that are pinned stay attached.
func (ls *links) close() error {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	var errs []error
	for _, l := range ls.open {
		errs = append(errs, l.Close())
	}
	clear(ls.open)

	return errors.Join(errs...)
}
