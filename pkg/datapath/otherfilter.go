package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/maps"
	"github.com/sluice-lb/sluice/pkg/node"
)

// A filter has no pin, and stays when the process that attached it ends. It belongs to the instance that has pinned its
// program, for the next agent, or a map that the program uses.

// programPins are the pins below a bpf root by which programs belong to it.
type programPins struct {
	programs []ebpf.ProgramID
	maps     []ebpf.MapID
}

// programPinsOf returns the pins below a bpf root. It leaves out what is neither a program nor a map, and what has just
// gone. It fails if too many files are open, because a program without a known pin is detached.
func programPinsOf(bpfRoot string) (programPins, error) {
	var pins programPins
	kept, err := filepath.Glob(filepath.Join(programDir(bpfRoot), "*"))
	if err != nil {
		return pins, fmt.Errorf("kept programs: %w", err)
	}
	for _, pin := range kept {
		program, err := ebpf.LoadPinnedProgram(pin, nil)
		if tooManyFiles(err) {
			return pins, fmt.Errorf("kept programs: %w", err)
		}
		if err != nil {
			continue
		}
		info, err := program.Info()
		if err := errors.Join(err, program.Close()); err != nil {
			return pins, fmt.Errorf("%s: %w", pin, err)
		}
		id, _ := info.ID()
		pins.programs = append(pins.programs, id)
	}
	folders, err := maps.Folders(bpfRoot)
	if err != nil {
		return pins, err
	}
	for _, folder := range folders {
		pinned, err := filepath.Glob(filepath.Join(folder, "*"))
		if err != nil {
			return pins, fmt.Errorf("pinned maps: %w", err)
		}
		for _, pin := range pinned {
			m, err := ebpf.LoadPinnedMap(pin, nil)
			if tooManyFiles(err) {
				return pins, fmt.Errorf("pinned maps: %w", err)
			}
			if err != nil {
				continue
			}
			info, err := m.Info()
			if err := errors.Join(err, m.Close()); err != nil {
				return pins, fmt.Errorf("%s: %w", pin, err)
			}
			id, _ := info.ID()
			pins.maps = append(pins.maps, id)
		}
	}

	return pins, nil
}

// has reports whether a program that uses these maps belongs to the bpf root of the pins.
func (p programPins) has(id ebpf.ProgramID, uses []ebpf.MapID) bool {
	return slices.Contains(p.programs, id) ||
		slices.ContainsFunc(uses, func(id ebpf.MapID) bool { return slices.Contains(p.maps, id) })
}

// othersByFilters returns the other instances that have filters at devices of the calling thread's network namespace.
func othersByFilters(bpfRoot string) ([]Other, error) {
	return findFilters(func() (programPins, error) { return programPinsOf(bpfRoot) })
}

// othersByFilters is [othersByFilters], for which maps that are open and not pinned are this instance's as well.
func (d *Datapath) othersByFilters() ([]Other, error) {
	return findFilters(func() (programPins, error) {
		own, err := programPinsOf(d.cfg.BPFRoot)
		if err != nil {
			return own, err
		}
		frontends, err := d.maps.ID(maps.NameFrontends)
		own.maps = append(own.maps, frontends)

		return own, err
	})
}

// findFilters returns the instances that have filters at devices of the calling thread's network namespace, without the
// one that has our own pins.
func findFilters(ownPins func() (programPins, error)) ([]Other, error) {
	filters, err := listFilters()
	if err != nil || len(filters) == 0 {
		return nil, err
	}
	own, err := ownPins()
	if err != nil {
		return nil, err
	}
	uses := make(map[ebpf.ProgramID][]ebpf.MapID) // of programs that are not our own
	for _, f := range filters {
		id := ebpf.ProgramID(f.Id)
		if _, known := uses[id]; known {
			continue
		}
		used, err := mapsOf(id)
		if err != nil {
			return nil, err
		}
		if !own.has(id, used) {
			uses[id] = used
		}
	}
	if len(uses) == 0 {
		return nil, nil
	}
	roots := make(map[ebpf.ProgramID]string)
	err = eachFolder("v[0-9]*", func(root string) error {
		pins, err := programPinsOf(root)
		if err != nil {
			return err
		}
		for id, used := range uses {
			if _, known := roots[id]; !known && pins.has(id, used) {
				roots[id] = root
			}
		}

		return nil
	})
	if err != nil {
		return nil, err
	}
	var all []Other
	for _, f := range filters {
		id := ebpf.ProgramID(f.Id)
		if _, isOther := uses[id]; !isOther {
			continue
		}
		at := slices.IndexFunc(all, func(o Other) bool { return o.BPFRoot == roots[id] })
		if at < 0 {
			at, all = len(all), append(all, Other{BPFRoot: roots[id]})
		}
		o := &all[at]
		o.Hooks = append(o.Hooks, f.device+" "+f.hook)
		o.Filters = append(o.Filters, fmt.Sprintf("dev %s %s pref %d handle %#x bpf", f.device, f.hook, f.Priority, f.Handle))
		o.programs = append(o.programs, id)
	}
	for _, o := range all {
		slices.Sort(o.Hooks)
	}

	return all, nil
}

// filterAt is a filter of some build of Sluice, and where it is.
type filterAt struct {
	*netlink.BpfFilter
	device, hook string
}

// listFilters returns the filters of Sluice at all devices of the calling thread's network namespace.
func listFilters() ([]filterAt, error) {
	qdiscs, err := listQdiscs()
	if err != nil || len(qdiscs) == 0 {
		return nil, err
	}
	devices, err := node.Complete(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	var all []filterAt
	for _, device := range devices {
		attrs := device.Attrs()
		if qdiscs[attrs.Index] != "clsact" {
			continue
		}
		for _, hook := range deviceHooks() {
			filters, err := filtersAt(attrs.Index, hook)
			if errors.Is(err, unix.ENODEV) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("device %s: %w", attrs.Name, err)
			}
			for _, f := range ours(filters) {
				all = append(all, filterAt{f, attrs.Name, hook.name})
			}
		}
	}

	return all, nil
}

// mapsOf returns the maps that a program uses: none if it has just gone, or if the capability to ask is missing.
func mapsOf(id ebpf.ProgramID) ([]ebpf.MapID, error) {
	program, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EPERM) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("program %d: %w", id, err)
	}
	info, err := program.Info()
	if err := errors.Join(err, program.Close()); err != nil {
		return nil, fmt.Errorf("program %d: %w", id, err)
	}
	used, _ := info.MapIDs()

	return used, nil
}

func tooManyFiles(err error) bool { return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) }

// takeover is what [Datapath.AttachDevices] does with the filters of other instances: those of agents that run stay, and
// the others are replaced, or detached.
type takeover struct {
	stays map[ebpf.ProgramID]Other
	locks []*MapsLock // of those that are taken over
}

// beginTakeover locks the other instances whose filters are taken over. The caller releases them.
func (d *Datapath) beginTakeover() (*takeover, error) {
	others, err := d.othersByFilters()
	if err != nil {
		return nil, err
	}
	if len(others) > 0 {
		d.devices.swept = false
	}
	t := &takeover{stays: make(map[ebpf.ProgramID]Other)}
	for _, o := range others {
		if o.BPFRoot != "" {
			lock, err := lockOther(o)
			if err != nil { // endOthers notes it
				for _, id := range o.programs {
					t.stays[id] = o
				}

				continue
			}
			t.locks = append(t.locks, lock)
		}
		if d.devices.taken[o.BPFRoot] == "" {
			d.devices.taken[o.BPFRoot] = "detached " + o.String() + "; connections that it translated at devices end"
		}
	}

	return t, nil
}

// keeps reports whether a filter with this program stays.
func (t *takeover) keeps(id ebpf.ProgramID) bool {
	_, stays := t.stays[id]

	return stays
}

// release releases what [Datapath.beginTakeover] has locked.
func (t *takeover) release() error {
	var errs []error
	for _, lock := range t.locks {
		errs = append(errs, lock.Release())
	}

	return errors.Join(errs...)
}

// endTakeover notes whose filters were taken over once there are none of theirs, and removes the pins of those that have
// no links either.
func (d *Datapath) endTakeover() error {
	if len(d.devices.taken) == 0 {
		return nil
	}
	others, err := d.Others()
	if err != nil {
		return err
	}
	var errs []error
	for root, text := range d.devices.taken {
		d.links.noteTaken(text)
		delete(d.devices.taken, root)
		if root == "" || slices.ContainsFunc(others, func(o Other) bool { return o.BPFRoot == root }) {
			continue
		}
		lock, err := LockMaps(root)
		if err != nil {
			errs = append(errs, fmt.Errorf("pins of another instance: %w", err))

			continue
		}
		errs = append(errs, removeRoot(root), lock.Release())
	}

	return errors.Join(errs...)
}
