package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// linkDir returns the folder of pinned links. It is not in the folder of a map
// version: a build with another layout updates the same links, so that there is no
// moment without a program.
func linkDir(bpfRoot string) string { return filepath.Join(bpfRoot, "links") }

// programDir returns the folder of pinned programs, which the next agent reuses
// without verifying them again.
func programDir(bpfRoot string) string { return filepath.Join(bpfRoot, "programs") }

// NotKept returns why programs of sockets could not be pinned for the next agent, which then
// takes longer to start; nil if all are.
func (d *Datapath) NotKept() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}

	return programs.NotKept
}

// DevicesNotKept is [Datapath.NotKept] for the programs of devices. It must not be called at
// the same time as [Datapath.AttachDevices].
func (d *Datapath) DevicesNotKept() error {
	var errs []error
	for _, programs := range d.devices.loaded {
		errs = append(errs, programs.NotKept)
	}

	return errors.Join(errs...)
}

// removeKept unpins the programs of other builds, and of this one with another configuration.
func (d *Datapath) removeKept() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}
	used := slices.Clone(programs.Kept)
	for _, devices := range d.devices.loaded {
		used = append(used, devices.Kept...)
	}
	entries, err := os.ReadDir(programDir(d.cfg.BPFRoot))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("kept programs: %w", err)
	}
	for _, entry := range entries {
		pin := filepath.Join(programDir(d.cfg.BPFRoot), entry.Name())
		if slices.Contains(used, pin) {
			continue
		}
		if err := os.Remove(pin); err != nil {
			return fmt.Errorf("kept programs: %w", err)
		}
	}

	return nil
}

// Attach attaches every program of sockets to the cgroup root, or replaces, in one
// step, the one that an earlier agent attached. An optional program may fail where
// the program of another owner does not allow others: [Hooks] reports that. After an
// error, programs that were attached before are still in force, and Attach can be
// called again. It waits for [Datapath.Loaded].
func (d *Datapath) Attach() error {
	programs, err := d.programs()
	if err != nil {
		return err
	}
	dir := linkDir(d.cfg.BPFRoot)
	cgroup, err := cgroupID(d.cfg.CgroupRoot)
	if err != nil {
		return err
	}
	// The hooks that translate answers are attached before those that translate
	// requests, so that no socket sees the address of a backend.
	for _, hook := range slices.Backward(programs.Sock) {
		err := d.attachHook(filepath.Join(dir, hook.Name), cgroup, hook)
		if err != nil && !hook.Optional() {
			return fmt.Errorf("hook %s: %w", hook.Name, err)
		}
	}

	if err := removeForeignLinks(dir, programs.Sock); err != nil {
		return err
	}

	if err := d.maps.CopyState(); err != nil {
		return err
	}

	return d.removeOtherVersions()
}

// removeOtherVersions unpins the maps of builds with another layout, which no
// program uses any more.
func (d *Datapath) removeOtherVersions() error {
	dirs, err := maps.OtherFolders(d.cfg.BPFRoot)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("maps of another version: %w", err)
		}
	}

	return nil
}

// OtherMapsInUse reports whether programs that an earlier agent attached are in force
// and use other maps: those of another layout, or maps whose pins were lost.
func (d *Datapath) OtherMapsInUse() (bool, error) {
	hooks, err := Hooks(d.cfg.BPFRoot, d.cfg.CgroupRoot)
	if err != nil {
		return false, err
	}
	ours, err := d.maps.ID(maps.NameFrontends)
	if err != nil {
		return false, err
	}
	for _, hook := range hooks {
		if hook.Problem != "" || !looksUpFrontends(hook.Name) {
			continue
		}
		used, err := mapsOf(filepath.Join(linkDir(d.cfg.BPFRoot), hook.Name))
		if err != nil {
			return false, fmt.Errorf("hook %s: %w", hook.Name, err)
		}
		if !slices.Contains(used, ours) {
			return true, nil
		}
	}

	return false, nil
}

// looksUpFrontends reports whether the program of this hook uses the map of frontends
// in every build.
func looksUpFrontends(hook string) bool {
	return strings.HasPrefix(hook, "connect") || strings.HasPrefix(hook, "sendmsg")
}

// mapsOf returns the maps that the program of a pinned link uses.
func mapsOf(pin string) ([]ebpf.MapID, error) {
	pinned, err := loadPinned(pin)
	if err != nil {
		return nil, err
	}
	defer pinned.Close()
	info, err := pinned.Info()
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	program, err := ebpf.NewProgramFromID(info.Program)
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", info.Program, err)
	}
	defer program.Close()
	ofProgram, err := program.Info()
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", info.Program, err)
	}
	used, _ := ofProgram.MapIDs()

	return used, nil
}

// attachHook attaches a hook to a cgroup, see [links.attach].
func (d *Datapath) attachHook(pin string, cgroup uint64, hook bpf.Hook) error {
	isThere := func(l link.Link) bool {
		on, err := linkCgroup(l)

		return err == nil && on == cgroup
	}

	return d.links.attach(pin, hook.Program, isThere, func() (link.Link, error) {
		attached, err := link.AttachCgroup(link.CgroupOptions{
			Path: d.cfg.CgroupRoot, Attach: hook.Attach, Program: hook.Program,
		})
		if err != nil {
			return nil, fmt.Errorf("attach to %s: %w", d.cfg.CgroupRoot, err)
		}

		return attached, nil
	})
}

// removeForeignLinks detaches the hooks of an earlier agent that are not among these.
func removeForeignLinks(dir string, hooks []bpf.Hook) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("link directory: %w", err)
	}
	for _, entry := range entries {
		ours := slices.ContainsFunc(hooks, func(h bpf.Hook) bool { return h.Name == entry.Name() })
		if ours || entry.IsDir() { // see deviceDir
			continue
		}
		if err := removeLink(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("link of another build: %w", err)
		}
	}

	return nil
}

func removeLinks(bpfRoot string) error {
	entries, err := os.ReadDir(linkDir(bpfRoot))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("link directory: %w", err)
	}
	// The reverse of the order of Attach.
	order := func(entry fs.DirEntry) int {
		return slices.IndexFunc(bpf.SockHooks(), func(h bpf.Hook) bool { return h.Name == entry.Name() })
	}
	slices.SortStableFunc(entries, func(a, b fs.DirEntry) int { return order(a) - order(b) })
	var errs []error
	for _, entry := range entries {
		if !entry.IsDir() { // see deviceDir
			errs = append(errs, removeLink(filepath.Join(linkDir(bpfRoot), entry.Name())))
		}
	}

	return errors.Join(errs...)
}

// removeLink detaches a pinned link and removes the pin. Removing the pin alone
// would detach the link as well, but some time later.
func removeLink(pin string) error {
	pinned, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return fmt.Errorf("pinned link: %w", err)
	}
	defer pinned.Close()
	if err := detach(pinned); err != nil {
		return err
	}

	return os.Remove(pin)
}

// detach detaches a link. It is not an error if the link is nil or its cgroup is gone.
func detach(l link.Link) error {
	if l == nil {
		return nil
	}
	if err := l.Detach(); err != nil && !errors.Is(err, unix.ENOLINK) {
		return fmt.Errorf("detach: %w", err)
	}

	return nil
}

func linkCgroup(l link.Link) (uint64, error) {
	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("link: %w", err)
	}
	cgroup := info.Cgroup()
	if cgroup == nil {
		return 0, errors.New("link is not on a cgroup")
	}

	return cgroup.CgroupId, nil
}

// cgroupID returns the kernel's id of a cgroup2 folder, which is its inode number.
func cgroupID(path string) (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", path, err)
	}

	return stat.Ino, nil
}
