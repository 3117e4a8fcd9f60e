package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// deviceDir has a folder for each device, named by its index.
func deviceDir(bpfRoot string) string { return filepath.Join(linkDir(bpfRoot), "devices") }

func devicePin(bpfRoot string, index int, hook deviceHook) string {
	return filepath.Join(deviceDir(bpfRoot), strconv.Itoa(index), hook.name)
}

// attachTCX attaches a program as a pinned link, see [attachLink].
func attachTCX(bpfRoot string, index int, hook deviceHook, program *ebpf.Program) error {
	pin := devicePin(bpfRoot, index, hook)
	if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	isThere := func(l link.Link) bool {
		id, err := runningAt(l, index, hook)

		return err == nil && id != 0
	}

	return attachLink(pin, program, isThere, func() (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{
			Interface: index, Program: program, Attach: hook.attach, Anchor: hook.anchor,
		})
	})
}

// runningAt returns the program of a link, if it runs at this hook of a device of
// our namespace, or 0. The link alone does not tell the namespace.
func runningAt(l link.Link, index int, hook deviceHook) (ebpf.ProgramID, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("link: %w", err)
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
	if err != nil {
		return 0, fmt.Errorf("query: %w", err)
	}
	for _, program := range result.Programs {
		if id, ok := program.LinkID(); ok && id == info.ID {
			return program.ID, nil
		}
	}

	return 0, nil
}

// detachTCX detaches all links to devices that keep does not want: also from
// those that went to another namespace, where links stay.
func detachTCX(bpfRoot string, keep func(index int) bool) error {
	entries, err := os.ReadDir(deviceDir(bpfRoot))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		index, err := strconv.Atoi(entry.Name())
		if err == nil && keep(index) {
			continue
		}
		if err := removeDeviceLinks(filepath.Join(deviceDir(bpfRoot), entry.Name())); err != nil {
			errs = append(errs, fmt.Errorf("device %s: %w", entry.Name(), err))
		}
	}

	return errors.Join(errs...)
}

// removeDeviceLinks detaches what is pinned for one device, in the reverse order
// of attaching.
func removeDeviceLinks(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	order := func(entry fs.DirEntry) int {
		return slices.IndexFunc(deviceHooks(), func(h deviceHook) bool { return h.name == entry.Name() })
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(order(b), order(a)) })
	for _, entry := range entries {
		if err := removeLink(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}

	return os.Remove(dir)
}

// tcxProgram returns the program of our pinned link, if the kernel says that it
// runs at the hook. It is 0 if there is no such link.
func tcxProgram(bpfRoot string, index int, hook deviceHook) (ebpf.ProgramID, error) {
	pinned, err := link.LoadPinnedLink(devicePin(bpfRoot, index, hook), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("pinned link: %w", err)
	}
	defer pinned.Close()
	id, err := runningAt(pinned, index, hook)
	if err == nil && id == 0 {
		err = errors.New("the link is pinned, but its program does not run there")
	}

	return id, err
}
