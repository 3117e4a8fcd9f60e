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
// unmounted or somebody empties it. Any goroutine may use them.
type links struct {
	bpfRoot string

	mu   sync.Mutex
	open map[string]link.Link // by the path of the pin
}

// attach updates the link that belongs to a pin, if it is where it should be and that
// still exists. Otherwise a new link takes its place. Either is pinned afterwards: an
// error may say that it is attached, and could not be.
func (ls *links) attach(pin string, program *ebpf.Program, isThere func(link.Link) bool, attach func() (link.Link, error)) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()

	current := ls.open[pin]
	if current == nil {
		pinned, err := link.LoadPinnedLink(pin, nil)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("pinned link: %w", err)
		}
		if err == nil {
			current, ls.open[pin] = pinned, pinned
		}
	}
	if current != nil && isThere(current) {
		err := current.Update(program)
		if err == nil {
			return ls.ensurePin(pin, current)
		}
		if !errors.Is(err, unix.ENOLINK) {
			return err
		}
	}

	attached, err := attach()
	if err != nil {
		return err
	}
	ls.open[pin] = attached
	err = ls.replacePin(pin, attached)
	if current != nil {
		err = errors.Join(err, detach(current), current.Close())
	}

	return err
}

// ensurePin pins a link whose pin is missing.
func (ls *links) ensurePin(pin string, l link.Link) error {
	_, err := os.Lstat(pin)
	if errors.Is(err, fs.ErrNotExist) {
		return ls.replacePin(pin, l)
	}

	return wrap("pinned link", err)
}

// replacePin pins a link, in one step in the place of the one before.
func (ls *links) replacePin(pin string, l link.Link) error {
	if err := CheckBPFRoot(ls.bpfRoot); err != nil {
		return err // or the folder would be made on another file system
	}
	if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	next := pin + "_next"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("unfinished pin of an earlier agent: %w", err)
	}
	// A link that was pinned once is moved from there, whatever is there now. Another
	// reference to the same link has no such past.
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

// pinAgain pins the links whose pins are missing, and returns their pins.
func (ls *links) pinAgain() ([]string, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	var missing []string
	var errs []error
	for _, pin := range slices.Sorted(maps.Keys(ls.open)) {
		if _, err := os.Lstat(pin); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		missing = append(missing, pin)
		errs = append(errs, ls.replacePin(pin, ls.open[pin]))
	}

	return missing, errors.Join(errs...)
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
	err := detachTCX(ls.bpfRoot, keep)
	ls.mu.Lock()
	defer ls.mu.Unlock()
	// What asks goes before what answers: the reverse of the order of attaching.
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
