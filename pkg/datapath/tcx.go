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
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
)

// deviceDir returns the folder that contains a folder for each device, named by its index.
func deviceDir(bpfRoot string) string { return filepath.Join(linkDir(bpfRoot), "devices") }

func devicePin(bpfRoot string, index int, hook deviceHook) string {
	return filepath.Join(deviceDir(bpfRoot), strconv.Itoa(index), hook.name)
}

// attachTCX attaches a program to a device, see [links.attach]. If stays returns false for the
// programs that run before it, it is attached anew. The kernel accepts a program only once at a
// hook, so the new link begins with another copy of it, until the old link is gone.
func (ls *links) attachTCX(index int, hook deviceHook, program *ebpf.Program, stays func(ahead []other) bool, load func() (*bpf.DevicePrograms, error)) error {
	isThere := func(l link.Link) bool {
		id, programs, err := runningAt(l, index, hook)
		if err != nil || id == 0 {
			return false
		}
		ahead := make([]other, 0, len(programs))
		for _, id := range programs {
			ahead = append(ahead, other{id, programName(id)})
		}

		return stays(ahead)
	}
	attach := func(program *ebpf.Program) (link.Link, error) {
		return link.AttachTCX(link.TCXOptions{
			Interface: index, Program: program, Attach: hook.attach, Anchor: hook.anchor,
		})
	}

	copied := false
	attachOrCopy := func() (link.Link, error) {
		l, err := attach(program)
		if !errors.Is(err, unix.EEXIST) {
			return l, err
		}
		programs, err := load()
		if err != nil {
			return nil, err
		}
		defer programs.Close() // the link has a reference
		copied = true

		return attach(hook.program(programs))
	}
	pin := devicePin(ls.bpfRoot, index, hook)
	err := ls.attach(pin, program, isThere, attachOrCopy)
	if err == nil && copied {
		err = ls.attach(pin, program, isThere, attachOrCopy)
	}

	return err
}

// runningAt returns the program of a link and those that run before it, or 0 if it
// does not run at this hook of a device of this namespace. The link itself does not
// show the namespace of its device.
func runningAt(l link.Link, index int, hook deviceHook) (ebpf.ProgramID, []ebpf.ProgramID, error) {
	info, err := l.Info()
	if err != nil {
		return 0, nil, fmt.Errorf("link: %w", err)
	}
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
	if err != nil {
		return 0, nil, fmt.Errorf("query: %w", err)
	}
	var ahead []ebpf.ProgramID
	for _, program := range result.Programs {
		if id, ok := program.LinkID(); ok && id == info.ID {
			return program.ID, ahead, nil
		}
		ahead = append(ahead, program.ID)
	}

	return 0, nil, nil
}

// detachTCX detaches all pinned links from devices for which keep returns false, also
// if these have moved to another namespace, where links stay attached.
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

// removeDeviceLinks detaches the pinned links of one device, in the reverse order of
// attaching.
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

// findLink returns whether the program of our link runs at a hook, and behind which others.
func findLink(get linkGetter, bpfRoot string, index int, hook deviceHook) (found, error) {
	l, err := get(devicePin(bpfRoot, index, hook))
	if errors.Is(err, fs.ErrNotExist) {
		return found{}, nil
	}
	if err != nil {
		return found{}, err
	}
	defer l.Close()
	id, ahead, err := runningAt(l, index, hook)
	if err == nil && id == 0 {
		err = errors.New("there is a link, but its program does not run there")
	}
	f := found{is: id != 0}
	for _, id := range ahead {
		f.ahead = append(f.ahead, programName(id))
	}

	return f, err
}

// programName returns the name of a program, or its number if it has none, or
// has just gone.
func programName(id ebpf.ProgramID) string {
	name := fmt.Sprintf("program %d", id)
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return name
	}
	defer program.Close()
	if info, err := program.Info(); err == nil && info.Name != "" {
		return info.Name
	}

	return name
}
