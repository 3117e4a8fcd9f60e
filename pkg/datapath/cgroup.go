package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// ErrNoCgroup2 is returned when no cgroup2 file system is mounted.
var ErrNoCgroup2 = errors.New("no cgroup2 file system is mounted (mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's)")

// rootCgroupID is the id of the root of cgroup2, in every cgroup namespace.
const rootCgroupID = 1

// Cgroup is a folder of a cgroup2 file system, and its place in the hierarchy.
type Cgroup struct {
	Path string
	// Relative is the path from the root of this process' cgroup namespace, as the
	// kernel writes it: "/" is that root, "/../.." is the second cgroup above it, "/a"
	// is below it, and "/../a" beside it.
	Relative string
	// WholeMachine is true for the root of cgroup2, which contains every process.
	WholeMachine bool
}

// FindCgroupRoot returns the widest cgroup that is mounted. On a node with systemd's
// unified or hybrid layout that is the root of cgroup2. A node that is itself a
// container, as those of kind, has a cgroup namespace, in which no mount shows that
// root: then it is the root of the node's namespace, if the node's folder is mounted,
// or else that of the pod's own.
// Returns [ErrNoCgroup2] if there is no mount.
func FindCgroupRoot() (Cgroup, error) {
	mounts, err := mountPoints("cgroup2")
	if err != nil {
		return Cgroup{}, err
	}
	if len(mounts) == 0 {
		return Cgroup{}, ErrNoCgroup2
	}
	var all []Cgroup
	for _, mount := range mounts {
		all = append(all, cgroupAt(mount, mount.Mountpoint, "."))
	}

	return widest(all), nil
}

// widest returns the first cgroup that no other one is wider than.
func widest(all []Cgroup) Cgroup {
	best := all[0]
	for _, cgroup := range all[1:] {
		if cgroup.isWiderThan(best) {
			best = cgroup
		}
	}

	return best
}

// LookupCgroup returns the Cgroup of a folder of a cgroup2 file system.
func LookupCgroup(path string) (Cgroup, error) {
	if err := checkCgroup2(path); err != nil {
		return Cgroup{}, fmt.Errorf("cgroup %q: %w", path, err)
	}
	real, err := filepath.Abs(path)
	if err == nil {
		real, err = filepath.EvalSymlinks(real)
	}
	if err != nil {
		return Cgroup{}, fmt.Errorf("cgroup %q: %w", path, err)
	}
	id, err := mountID(real)
	if err != nil {
		return Cgroup{}, err
	}
	mounts, err := mountPoints("cgroup2")
	if err != nil {
		return Cgroup{}, err
	}
	for _, mount := range mounts {
		below, err := filepath.Rel(mount.Mountpoint, real)
		if err == nil && mount.ID == id {
			return cgroupAt(mount, path, below), nil
		}
	}

	return Cgroup{}, fmt.Errorf("cgroup %q: no mount leads there", path)
}

// cgroupAt returns the cgroup at a path. Below is the path from the mount point.
func cgroupAt(mount *mountinfo.Info, path, below string) Cgroup {
	c := Cgroup{Path: path, Relative: mount.Root}
	if below != "." {
		c.Relative = strings.TrimSuffix(mount.Root, "/") + "/" + below
	}
	id, err := cgroupID(path)
	c.WholeMachine = err == nil && id == rootCgroupID

	return c
}

// NotCovered describes the sockets of processes outside of the cgroup. It returns ""
// if there are none.
func (c Cgroup) NotCovered() string {
	up, names := splitCgroup(c.Relative)
	switch {
	case c.WholeMachine:
		return ""
	case len(names) > 0:
		return "sockets of processes outside of this cgroup: what pods among them send is translated at their devices, " +
			"and what processes of the node send over TCP is not"
	case up > 0:
		return "sockets of processes outside of this cgroup: if this node is itself a container, those of the machine's other containers"
	}

	return "sockets of processes outside of this cgroup, which is the root of a cgroup namespace: " +
		"if that is a pod's, those of all other pods, whose packets are translated at their devices, and of the node, which are not translated"
}

// isWiderThan reports whether a cgroup is preferred to another: the root of cgroup2
// first, then the one furthest above the root of this process' cgroup namespace.
func (c Cgroup) isWiderThan(other Cgroup) bool {
	if c.WholeMachine || other.WholeMachine {
		return !other.WholeMachine
	}
	if own, others := contains(c.Relative, "/"), contains(other.Relative, "/"); own != others {
		return own
	}

	return contains(c.Relative, other.Relative) && c.Relative != other.Relative
}

// holdsThisProcess reports whether this process is in the cgroup at path or below,
// and false if that cannot be found out.
func holdsThisProcess(path string) bool {
	cgroup, err := LookupCgroup(path)
	if err != nil {
		return false
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return false
	}
	own, ok := parseOwnCgroup(string(text))

	return ok && (cgroup.WholeMachine || contains(cgroup.Relative, own))
}

// parseOwnCgroup returns the cgroup2 path in the text of /proc/PID/cgroup. It begins
// at the root of the reader's cgroup namespace.
func parseOwnCgroup(text string) (string, bool) {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			return strings.TrimSuffix(path, " (deleted)"), true
		}
	}

	return "", false
}

// contains reports whether a cgroup is other or above it. Both are paths from the
// root of the same namespace, and go up no further than needed. So a path that goes
// up less is below every cgroup that the other reaches by going up alone, and below
// none of those beside it.
func contains(cgroup, other string) bool {
	up, names := splitCgroup(cgroup)
	otherUp, otherNames := splitCgroup(other)
	if up != otherUp {
		return up > otherUp && len(names) == 0
	}

	return len(otherNames) >= len(names) && slices.Equal(otherNames[:len(names)], names)
}

// splitCgroup returns how many cgroups a path goes up, and the names by which it
// then goes down.
func splitCgroup(path string) (up int, names []string) {
	names = strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	for len(names) > 0 && names[0] == ".." {
		up++
		names = names[1:]
	}

	return up, names
}

// CheckCgroupRoot returns an error that names the folder if it is no cgroup2.
func CheckCgroupRoot(path string) error {
	if err := checkCgroup2(path); err != nil {
		return fmt.Errorf("cgroup root %q: %w", path, err)
	}

	return nil
}

func checkCgroup2(path string) error {
	if path == "" {
		return errors.New("a path is required")
	}
	magic, err := fileSystem(path)
	if err != nil {
		return err
	}
	if magic != unix.CGROUP2_SUPER_MAGIC {
		return errors.New("not on a cgroup2 file system (mount -t cgroup2 none /sys/fs/cgroup, or see /proc/mounts for where it is)")
	}

	return nil
}

// PodsWithCgroup returns which of these pods, by their UIDs, have a cgroup below root. Only those can
// opt out of translation at sockets.
func PodsWithCgroup(root string, uids []string) (map[string]bool, error) {
	found := make(map[string]bool)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was removed meanwhile
		}
		if err != nil || !entry.IsDir() {
			return err
		}
		name := strings.ReplaceAll(strings.TrimSuffix(entry.Name(), ".slice"), "_", "-")
		for _, uid := range uids {
			if strings.HasSuffix(name, "pod"+uid) {
				found[uid] = true

				return fs.SkipDir
			}
		}

		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("cgroups of pods: %w", err)
	}

	return found, nil
}

// cgroupID returns the kernel's id of a cgroup2 folder, which is its inode number.
func cgroupID(path string) (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); err != nil {
		return 0, fmt.Errorf("cgroup %s: %w", path, err)
	}

	return stat.Ino, nil
}

// findCgroups sets the paths of the cgroups below root that are in a map by their ids.
func findCgroups(root string, paths map[uint64]string) error {
	left := len(paths)
	if left == 0 {
		return nil
	}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil // it was removed meanwhile
		}
		if err != nil || !entry.IsDir() {
			return err
		}
		id, err := cgroupID(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		if err != nil {
			return err
		}
		if _, wanted := paths[id]; wanted {
			paths[id] = path
			left--
		}
		if left == 0 {
			return fs.SkipAll
		}

		return nil
	})
	if err != nil {
		return fmt.Errorf("cgroups below %s: %w", root, err)
	}

	return nil
}
