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

	"github.com/sluice-lb/sluice/bpf"
)

// links are the links of attached programs. A link ends with its last reference: its
// pin makes it outlive this process, and the reference of this process makes it
// outlive the pin, which is lost when bpffs is unmounted or emptied. The methods may
// be called by several goroutines.
type links struct {
	bpfRoot string

	mu       sync.Mutex
	open     map[string]link.Link // by the path of the pin
	untraced map[string]error     // why a tracepoint is not attached to, by the same
	taken    []string             // see [Datapath.TakenOver]
	noted    []string             // what is not noted a second time
}

// attach updates the link that belongs to a pin, if isThere reports that it is in its
// place, and the cgroup or device still exists. Otherwise it calls attach for a new
// link, and detaches the old one. A new link stays attached even if it cannot be
// pinned: see [links.pinAgain].
func (ls *links) attach(pin string, program *ebpf.Program, isThere func(link.Link) bool, attach func() (link.Link, error)) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()

	current, err := ls.current(pin)
	if err != nil {
		return err
	}
	if current != nil && isThere(current) {
		err := current.Update(program)
		if !errors.Is(err, unix.ENOLINK) {
			return err
		}
	}

	return ls.replace(pin, current, attach)
}

// trace attaches a program to a tracepoint, unless the link that belongs to a pin runs it already.
// Such a link cannot be updated: until the old one is closed, the programs of both run. If the
// program was not loaded, or not attached, [links.get] returns that error.
func (ls *links) trace(pin string, hook bpf.Hook, notLoaded error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.untraced[pin] = notLoaded
	if hook.Program == nil {
		return
	}
	current, err := ls.current(pin)
	runs := false
	if err == nil && current != nil {
		ofLink, linkErr := current.Info()
		ofProgram, programErr := hook.Program.Info()
		if err = errors.Join(linkErr, programErr); err == nil {
			id, _ := ofProgram.ID()
			runs = ofLink.Program == id
		}
	}
	if err == nil && !runs {
		err = ls.replace(pin, current, func() (link.Link, error) {
			return link.AttachTracing(link.TracingOptions{Program: hook.Program, AttachType: hook.Attach})
		})
	}
	ls.untraced[pin] = wrap("trace", err)
}

// current returns the link that belongs to a pin, nil if there is none.
func (ls *links) current(pin string) (link.Link, error) {
	if l := ls.open[pin]; l != nil {
		return l, nil
	}
	pinned, err := loadPinned(pin)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		ls.open[pin] = pinned
	}

	return pinned, err
}

// replace attaches a new link, and detaches the current one, which may be nil.
func (ls *links) replace(pin string, current link.Link, attach func() (link.Link, error)) error {
	attached, err := attach()
	if err != nil {
		return err
	}
	ls.open[pin] = attached
	if ls.replacePin(pin, attached) != nil {
		// A pin of the old link would look right: without one, pinAgain tries again,
		// and returns why it fails.
		_ = os.Remove(pin)
	}
	if current != nil {
		err = errors.Join(detach(current), current.Close())
	}

	return err
}

// replacePin pins a link, and replaces an earlier pin in one step. It does not create
// the folder of all pins, which contains the lock of the agent that created it.
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
	// Package link moves the pin of a link that has one; a new reference has none.
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

// pins returns the pins of all links, sorted.
func (ls *links) pins() []string {
	ls.mu.Lock()
	defer ls.mu.Unlock()

	return slices.Sorted(maps.Keys(ls.open))
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

// get returns the link that belongs to a pin, even if it is open and not pinned. The
// error wraps [fs.ErrNotExist] if there is none. The caller closes the link.
func (ls *links) get(pin string) (link.Link, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if err := ls.untraced[pin]; err != nil {
		return nil, err
	}
	if l := ls.open[pin]; l != nil {
		return reopen(l)
	}

	return loadPinned(pin)
}

// loadPinned returns a pinned link. The error wraps [fs.ErrNotExist] if there is none.
// The caller closes the link.
func loadPinned(pin string) (link.Link, error) {
	l, err := link.LoadPinnedLink(pin, nil)

	return l, wrap("pinned link", err)
}

// detachDevices detaches our links, pinned or not, from the devices for which keep
// returns false.
func (ls *links) detachDevices(keep func(index int) bool) error {
	// Under the lock, or pinAgain would pin links that are being detached.
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

// removePinned detaches the pinned links of a folder, except those that keep returns true for, and removes their
// pins: first those with these names, in this order. If one of these cannot be detached, those that come later stay
// attached, because hooks of requests come before those that translate their answers. It leaves folders alone, and a missing one is
// not an error. Removing a pin alone would detach its link as well, but some time later.
func removePinned(dir string, first []string, keep func(name string) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("link directory: %w", err)
	}
	var errs []error
	slices.SortStableFunc(entries, func(a, b fs.DirEntry) int { return compareIn(first, a.Name(), b.Name()) })
	for _, entry := range entries {
		if entry.IsDir() || keep(entry.Name()) {
			continue
		}
		pin := filepath.Join(dir, entry.Name())
		pinned, err := loadPinned(pin)
		if err == nil {
			err = errors.Join(detach(pinned), pinned.Close())
		}
		if err == nil {
			err = os.Remove(pin)
		}
		errs = append(errs, err)
		if err != nil && slices.Contains(first, entry.Name()) {
			break
		}
	}

	return errors.Join(errs...)
}

// compareIn compares two names by their places in a list. All others come after it.
func compareIn(list []string, a, b string) int {
	place := func(name string) int {
		if at := slices.Index(list, name); at >= 0 {
			return at
		}

		return len(list)
	}

	return place(a) - place(b)
}

// detach detaches a link. It is not an error if the link is nil or its cgroup is gone. The link
// of a tracepoint cannot be detached: it ends with its last reference.
func detach(l link.Link) error {
	if l == nil {
		return nil
	}
	if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) && !errors.Is(err, link.ErrNotSupported) {
		return fmt.Errorf("detach: %w", err)
	}

	return nil
}
