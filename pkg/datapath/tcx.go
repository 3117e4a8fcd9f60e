package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

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
func (ls *links) attachTCX(index int, hook deviceHook, program *ebpf.Program, stays func(ahead []attached) bool, load func() (*bpf.DevicePrograms, error)) error {
	isThere := func(l link.Link) bool {
		runs, ahead, err := runningAt(l, index, hook)

		return err == nil && runs && stays(ahead)
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

// attached is a program of tcx or a filter at a hook of a device.
type attached struct {
	id     ebpf.ProgramID // 0: a filter that is no program
	link   link.ID        // of tcx
	filter string         // its name, or its type
}

// String returns the name.
func (a attached) String() string {
	if a.filter != "" {
		return a.filter
	}

	return programName(a.id)
}

// isOurs reports whether some build of Sluice attached it.
func (a attached) isOurs() bool { return strings.HasPrefix(a.String(), programPrefix) }

// tcxAt returns the programs of tcx at a hook, in the order in which they run. There are none before Linux 6.6.
func tcxAt(index int, hook deviceHook) ([]attached, error) {
	result, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: hook.attach})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, ebpf.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("query: %w", err)
	}
	var all []attached
	for _, program := range result.Programs {
		linkID, _ := program.LinkID()
		all = append(all, attached{id: program.ID, link: linkID})
	}

	return all, nil
}

// runningAt reports whether the program of a link runs at this hook of a device of this namespace, and behind which
// others. The link itself does not show the namespace of its device.
func runningAt(l link.Link, index int, hook deviceHook) (runs bool, ahead []attached, err error) {
	info, err := l.Info()
	if err != nil {
		return false, nil, fmt.Errorf("link: %w", err)
	}
	all, err := tcxAt(index, hook)
	at := slices.IndexFunc(all, func(a attached) bool { return a.link == info.ID })
	if at < 0 {
		return false, nil, err
	}

	return true, all[:at], nil
}

// detachTCX detaches all pinned links from devices for which keep returns false, in the reverse order of
// attaching, also if these have moved to another namespace, where links stay attached.
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
		dir := filepath.Join(deviceDir(bpfRoot), entry.Name())
		err = removePinned(dir, []string{"ingress", "egress"}, func(string) bool { return false })
		if err == nil {
			err = os.Remove(dir)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("device %s: %w", entry.Name(), err))
		}
	}

	return errors.Join(errs...)
}

// findLink reports whether the program of our link runs at a hook, and behind which others.
func findLink(get linkGetter, bpfRoot string, index int, hook deviceHook) (runs bool, ahead []attached, err error) {
	l, err := get(devicePin(bpfRoot, index, hook))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil, nil
	}
	if err != nil {
		return false, nil, err
	}
	defer l.Close()
	runs, ahead, err = runningAt(l, index, hook)
	if err == nil && !runs {
		err = errors.New("there is a link, but its program does not run there")
	}

	return runs, ahead, err
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
