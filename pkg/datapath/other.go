package datapath

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-lb/sluice/bpf"
	"github.com/sluice-lb/sluice/maps"
)

// Other is another instance of Sluice: its programs act on sockets of processes in the cgroup root or below, or at
// devices of this network namespace, and neither their links nor, of filters, they or their maps are pinned below our bpf
// root. They look up maps that our agent does not fill.
type Other struct {
	// BPFRoot is where its pins are, empty if no bpffs that is mounted here has any. Links of such an instance are alive:
	// a process holds them, or they are pinned in a bpffs of another container or node. Filters stay without either.
	BPFRoot string `json:"bpfRoot,omitempty"`
	// Hooks are where it is attached, as "connect4" of the cgroup root, "connect4 of /sys/fs/cgroup/a" of a cgroup below
	// it, "connect4 above /sys/fs/cgroup/a" of one that contains it, or "eth0 ingress".
	Hooks []string `json:"hooks"`
	// Links are the links, by their numbers in the kernel.
	Links []uint32 `json:"links"`
	// Filters are those of clsact, as tc names them: "dev eth0 ingress pref 1 handle 0x51ce bpf".
	Filters []string `json:"filters,omitempty"`

	programs []ebpf.ProgramID // of the filters
}

// String says whose programs they are, and where they are attached.
func (o Other) String() string {
	whose := "another Sluice, pinned below " + o.BPFRoot
	if o.BPFRoot == "" {
		whose = "another Sluice of which no pin is found here"
		if len(o.Links) > 0 {
			whose += ", so it runs elsewhere"
		}
	}
	var by []string
	if len(o.Links) > 0 {
		by = append(by, "links "+strings.Trim(fmt.Sprint(o.Links), "[]"))
	}
	if len(o.Filters) > 0 {
		by = append(by, fmt.Sprintf("%d filters", len(o.Filters)))
	}

	return fmt.Sprintf("programs of %s, at %s (%s)", whose, strings.Join(o.Hooks, ", "), strings.Join(by, ", "))
}

// Others returns the other instances that act on the sockets of a cgroup, or at the devices of the calling thread's
// network namespace. It needs no agent.
func Others(bpfRoot, cgroupRoot string) ([]Other, error) {
	own, err := pinnedLinks(bpfRoot)
	if err != nil {
		return nil, err
	}
	byLinks, err := findOthers(cgroupRoot, func(id link.ID) bool { return slices.Contains(own, id) })
	if err != nil {
		return nil, err
	}
	byFilters, err := othersByFilters(bpfRoot)

	return merge(byLinks, byFilters), err
}

// Others is [Others], for which links that are open and not pinned are this instance's as well.
func (d *Datapath) Others() ([]Other, error) {
	byLinks, err := d.links.others(d.cfg.CgroupRoot)
	if err != nil {
		return nil, err
	}
	byFilters, err := d.othersByFilters()

	return merge(byLinks, byFilters), err
}

// merge returns the instances of two lists, each once, sorted by their bpf roots.
func merge(all, more []Other) []Other {
	for _, o := range more {
		at := slices.IndexFunc(all, func(have Other) bool { return have.BPFRoot == o.BPFRoot })
		if at < 0 {
			all = append(all, o)

			continue
		}
		have := &all[at]
		have.Hooks = append(have.Hooks, o.Hooks...)
		slices.Sort(have.Hooks)
		have.Filters, have.programs = o.Filters, o.programs
	}
	slices.SortFunc(all, func(a, b Other) int { return cmp.Compare(a.BPFRoot, b.BPFRoot) })

	return all
}

// others returns the instances that act by links. While it looks, no link is attached that has no pin yet.
func (ls *links) others(cgroupRoot string) ([]Other, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	own, err := pinnedLinks(ls.bpfRoot)
	if err != nil {
		return nil, err
	}
	for pin, l := range ls.open {
		info, err := l.Info()
		if err != nil {
			return nil, fmt.Errorf("link of %s: %w", pin, err)
		}
		own = append(own, info.ID)
	}

	return findOthers(cgroupRoot, func(id link.ID) bool { return slices.Contains(own, id) })
}

// findOthers returns the instances that act on processes of a cgroup or on devices by links that are not our own.
func findOthers(cgroupRoot string, isOwn func(link.ID) bool) ([]Other, error) {
	cgroup, err := cgroupID(cgroupRoot)
	if err != nil {
		return nil, err
	}
	hooks := make(map[link.ID]string)
	var elsewhere []*link.Info // at other cgroups, which exist
	err = eachLink(func(info *link.Info) bool {
		atCgroup, atDevice := info.Cgroup(), info.TCX()
		isSock := info.Type == link.CgroupType && atCgroup != nil && atCgroup.CgroupId != 0
		isDevice := info.Type == link.TCXType && atDevice != nil
		if !isSock && !isDevice || isOwn(info.ID) || !strings.HasPrefix(programName(info.Program), programPrefix) {
			return false
		}
		switch {
		case isDevice:
			if hook := deviceHookOf(info.ID, int(atDevice.Ifindex)); hook != "" {
				hooks[info.ID] = hook
			}
		case atCgroup.CgroupId == cgroup:
			hooks[info.ID] = sockHookAt(ebpf.AttachType(atCgroup.AttachType))
		default:
			elsewhere = append(elsewhere, info)
		}

		return false
	})
	if err == nil && len(elsewhere) > 0 {
		err = addHooksElsewhere(hooks, cgroupRoot, elsewhere)
	}
	if err != nil || len(hooks) == 0 {
		return nil, err
	}
	roots, err := rootsOf(hooks)
	if err != nil {
		return nil, err
	}
	var all []Other
	for id, hook := range hooks {
		at := slices.IndexFunc(all, func(o Other) bool { return o.BPFRoot == roots[id] })
		if at < 0 {
			at, all = len(all), append(all, Other{BPFRoot: roots[id]})
		}
		all[at].Hooks, all[at].Links = append(all[at].Hooks, hook), append(all[at].Links, uint32(id))
	}
	for _, o := range all {
		slices.Sort(o.Hooks)
		slices.Sort(o.Links)
	}

	return all, nil
}

// addHooksElsewhere adds the hooks of those links, at other cgroups, whose programs act on processes in the cgroup root or
// below: the kernel runs the programs of each cgroup that contains a process, from the innermost outwards.
func addHooksElsewhere(hooks map[link.ID]string, cgroupRoot string, elsewhere []*link.Info) error {
	root, err := os.Open(cgroupRoot)
	if err != nil {
		return fmt.Errorf("cgroup root: %w", err)
	}
	defer root.Close()
	below := make(map[uint64]string) // paths of the cgroups by their ids, "" of those that are not found below
	effective := make(map[ebpf.AttachType][]link.AttachedProgram)
	for _, info := range elsewhere {
		attach := ebpf.AttachType(info.Cgroup().AttachType)
		if _, known := effective[attach]; !known {
			result, err := link.QueryPrograms(link.QueryOptions{Target: int(root.Fd()), Attach: attach, QueryFlags: unix.BPF_F_QUERY_EFFECTIVE})
			if err != nil {
				return fmt.Errorf("query %s: %w", sockHookAt(attach), err)
			}
			effective[attach] = result.Programs
		}
		// It need not be visible here: a mount can begin below it.
		if slices.ContainsFunc(effective[attach], func(p link.AttachedProgram) bool { return p.ID == info.Program }) {
			hooks[info.ID] = sockHookAt(attach) + " above " + cgroupRoot
		} else {
			below[info.Cgroup().CgroupId] = ""
		}
	}
	if err := findCgroups(cgroupRoot, below); err != nil {
		return err
	}
	for _, info := range elsewhere {
		if path := below[info.Cgroup().CgroupId]; path != "" {
			hooks[info.ID] = sockHookAt(ebpf.AttachType(info.Cgroup().AttachType)) + " of " + path
		}
	}

	return nil
}

// sockHookAt returns the name of a hook of sockets, by its type.
func sockHookAt(attach ebpf.AttachType) string {
	for _, hook := range bpf.SockHooks() {
		if hook.Attach == attach {
			return hook.Name
		}
	}

	return attach.String()
}

// deviceHookOf returns the device and hook at which the program of a link runs, or "" if that is in another network
// namespace.
func deviceHookOf(id link.ID, index int) string {
	device, err := netlink.LinkByIndex(index)
	if err != nil {
		return ""
	}
	for _, hook := range deviceHooks() {
		all, err := tcxAt(index, hook)
		if err == nil && slices.ContainsFunc(all, func(a attached) bool { return a.link == id }) {
			return device.Attrs().Name + " " + hook.name
		}
	}

	return ""
}

// pinnedLinks returns the links that are pinned below a bpf root.
func pinnedLinks(bpfRoot string) ([]link.ID, error) {
	var ids []link.ID
	for _, pattern := range []string{"*", "trace/*", "devices/*/*"} {
		pins, err := filepath.Glob(filepath.Join(linkDir(bpfRoot), pattern))
		if err != nil {
			return nil, fmt.Errorf("pinned links: %w", err)
		}
		for _, pin := range pins {
			l, err := loadPinned(pin)
			if err != nil {
				continue // a folder, or no link, or it has just gone
			}
			info, err := l.Info()
			if err := errors.Join(err, l.Close()); err != nil {
				return nil, fmt.Errorf("%s: %w", pin, err)
			}
			ids = append(ids, info.ID)
		}
	}

	return ids, nil
}

func isFolder(path string) bool {
	info, err := os.Stat(path)

	return err == nil && info.IsDir()
}

// rootsOf returns the bpf roots below which these links are pinned, in any bpffs that is mounted here.
func rootsOf(hooks map[link.ID]string) (map[link.ID]string, error) {
	roots := make(map[link.ID]string)
	err := eachFolder(filepath.Base(linkDir("")), func(root string) error {
		ids, err := pinnedLinks(root)
		if err != nil {
			return nil // pins of others
		}
		for _, id := range ids {
			if _, known := roots[id]; !known && hooks[id] != "" {
				roots[id] = root
			}
		}

		return nil
	})

	return roots, err
}

// eachFolder calls f for every folder, in any bpffs that is mounted here, that has a folder whose name matches a
// pattern.
func eachFolder(pattern string, f func(path string) error) error {
	mounts, err := mountPoints("bpf")
	if err != nil {
		return err
	}
	for _, mount := range mounts {
		err := filepath.WalkDir(mount.Mountpoint, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.IsDir() {
				return nil // a folder of others that has just gone, for one
			}
			if matches, err := filepath.Match(pattern, entry.Name()); err != nil || !matches {
				return err
			}
			if err := f(filepath.Dir(path)); err != nil {
				return err
			}

			return fs.SkipDir
		})
		if err != nil {
			return fmt.Errorf("pins below %s: %w", mount.Mountpoint, err)
		}
	}

	return nil
}

// A link that is being created cannot be opened yet: it is tried again after a pause, so often for all links of a list.
const (
	linkTries = 200
	linkPause = 5 * time.Millisecond
)

// eachLink calls f for every link of the kernel until f returns true. It leaves out links that end meanwhile, that stay
// unfinished, and those about which the kernel tells nothing.
func eachLink(f func(*link.Info) bool) error {
	tries := linkTries
	for id := link.ID(0); ; {
		next, err := nextLink(id)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("list links: %w", err)
		}
		id = next
		l, err := link.NewFromID(id)
		for ; errors.Is(err, unix.EAGAIN) && tries > 0; tries-- {
			time.Sleep(linkPause)
			l, err = link.NewFromID(id)
		}
		if tooManyFiles(err) {
			return fmt.Errorf("link %d: %w", id, err) // so would be all that follow
		}
		if err != nil {
			continue
		}
		info, err := l.Info()
		l.Close()
		if err == nil && f(info) {
			return nil
		}
	}
}

// nextLink returns the number of the first link after id. [link.Iterator] cannot pass one that cannot be opened. The
// error wraps [fs.ErrNotExist] behind the last one.
func nextLink(id link.ID) (link.ID, error) {
	attr := struct{ start, next, flags uint32 }{start: uint32(id)}
	_, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_LINK_GET_NEXT_ID, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if errno != 0 {
		return 0, errno
	}

	return link.ID(attr.next), nil
}

// inheritRoot moves the pins of another instance to our bpf root, if none of our own programs is in force: so a node
// whose agent gets another --bpf-root keeps its flows, sockets and affinity. Where pins cannot be moved,
// [Datapath.Attach] and [Datapath.AttachDevices] end the other instance. The error wraps [ErrRunning] if an
// agent keeps it and nothing of our own is in force. It returns what it has moved.
func inheritRoot(bpfRoot, cgroupRoot string) (taken []string, err error) {
	others, err := Others(bpfRoot, cgroupRoot)
	if errors.Is(err, unix.EPERM) {
		return nil, nil // loading programs says which capability is missing
	}
	if err != nil || len(others) == 0 {
		return nil, err
	}
	hooks, err := Hooks(bpfRoot, cgroupRoot)
	if err != nil {
		return nil, err
	}
	inForce := slices.ContainsFunc(hooks, func(h HookState) bool { return h.Problem == "" })
	for _, o := range others {
		if o.BPFRoot == "" {
			continue
		}
		lock, err := lockOther(o)
		if inForce && errors.Is(err, ErrRunning) {
			continue
		}
		if err != nil {
			return taken, err
		}
		if !inForce && onSameMount(o.BPFRoot, bpfRoot) {
			inForce, taken = true, append(taken, fmt.Sprintf("moved to %s with all flows: %v", bpfRoot, o))
			err = movePins(o.BPFRoot, bpfRoot)
		}
		if err := errors.Join(err, lock.Release()); err != nil {
			return taken, fmt.Errorf("pins below %s: %w", o.BPFRoot, err)
		}
	}

	return taken, nil
}

// lockOther locks the maps of another instance. The error wraps [ErrRunning] if an agent or a cleanup has them.
func lockOther(o Other) (*MapsLock, error) {
	lock, err := LockMaps(o.BPFRoot)
	if errors.Is(err, ErrRunning) {
		return nil, fmt.Errorf("%v: an agent or a cleanup has it: stop it first: %w", o, err)
	}

	return lock, err
}

// onSameMount reports whether pins can be renamed from a folder to another one, which need not exist yet. Two mounts of
// one file system are not the same.
func onSameMount(from, to string) bool {
	if !isFolder(to) {
		to = filepath.Dir(to)
	}
	a, errA := mountID(from)
	b, errB := mountID(to)

	return errors.Join(errA, errB) == nil && a == b
}

// movePins moves the folders of maps, programs and links, each in one step and the links last. One of the same name
// that is there was in force earlier. An agent that is killed meanwhile leaves the links where they were, and the next
// one moves the rest.
func movePins(from, to string) error {
	folders, err := maps.Folders(from)
	if err := errors.Join(err, os.MkdirAll(to, 0o700)); err != nil {
		return err
	}
	for _, folder := range append(folders, programDir(from), linkDir(from)) {
		if !isFolder(folder) {
			continue
		}
		moved := filepath.Join(to, filepath.Base(folder))
		if err := errors.Join(os.RemoveAll(moved), os.Rename(folder, moved)); err != nil {
			return err
		}
	}

	return removeRoot(from)
}

// endOthers detaches the programs of other instances from the hooks that match, and removes the pins of those that have
// none left. What it cannot end is noted, and no error: our own programs are attached all the same, and
// [Datapath.Verify] reports whether they are in charge.
func (d *Datapath) endOthers(matches func(link.Type) bool) {
	others, err := d.Others()
	if err != nil {
		d.links.noteOnce(fmt.Sprintf("whether another Sluice is attached is not known: %v", err))
	}
	for _, o := range others {
		err := d.endOther(o, matches)
		switch {
		case o.BPFRoot == "" && len(o.Links) == 0: // filters, which AttachDevices replaces
		case o.BPFRoot == "":
			d.links.noteOnce("left attached: " + o.String())
		case errors.Is(err, ErrRunning):
			d.links.noteOnce(fmt.Sprintf("not ended: %v: an agent or a cleanup has it", o))
		case err != nil:
			d.links.noteOnce(fmt.Sprintf("not ended: %v: %v", o, err))
		}
	}
}

// endOther is endOthers for one. One without a pin is alive, so it is left alone. The error wraps [ErrRunning] if an
// agent keeps it.
func (d *Datapath) endOther(o Other, matches func(link.Type) bool) (err error) {
	if o.BPFRoot == "" {
		return nil
	}
	lock, err := lockOther(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	left, ended := 0, 0
	if len(o.Filters) > 0 && matches(link.TCXType) {
		err := detachFilters(nil, func(int) bool { return false }, func(id ebpf.ProgramID) bool { return !slices.Contains(o.programs, id) })
		if err != nil {
			return err
		}
		ended += len(o.Filters)
	} else {
		left += len(o.Filters)
	}
	// From the last that was attached to the first: hooks of requests before those that translate their answers.
	for _, id := range slices.Backward(o.Links) {
		l, err := link.NewFromID(link.ID(id))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("link %d: %w", id, err)
		}
		info, err := l.Info()
		if err == nil && matches(info.Type) {
			err = detach(l)
			ended++
		} else {
			left++
		}
		if err := errors.Join(err, l.Close()); err != nil {
			return fmt.Errorf("link %d: %w", id, err)
		}
	}
	if ended > 0 {
		d.links.noteTaken("detached " + o.String() + "; connections that it translated at devices end")
	}
	if left == 0 {
		err = removeRoot(o.BPFRoot)
	}

	return err
}

// noteTaken notes what was taken over, for [Datapath.TakenOver].
func (ls *links) noteTaken(text string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.taken = append(ls.taken, text)
}

// noteOnce is noteTaken for a text that is not noted a second time.
func (ls *links) noteOnce(text string) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if !slices.Contains(ls.noted, text) {
		ls.noted, ls.taken = append(ls.noted, text), append(ls.taken, text)
	}
}

// TakenOver returns a sentence for each other instance whose pins were moved, whose programs were detached, or that
// stays attached, since the last call. Any goroutine may call it.
func (d *Datapath) TakenOver() []string {
	d.links.mu.Lock()
	defer d.links.mu.Unlock()
	taken := d.links.taken
	d.links.taken = nil

	return taken
}

// reportTakenOver logs and records what [Datapath.TakenOver] returns, and logs what of another version there is no room for.
func (d *Datapath) reportTakenOver(log *slog.Logger, record func(Event)) {
	for _, text := range d.maps.LeftBehind() {
		log.Warn("counts or flows are lost", "because", text)
	}
	for _, text := range d.TakenOver() {
		log.Warn("another Sluice acts on this node, or did", "takenOver", text)
		record(Event{OtherTakenOver, text})
	}
}
