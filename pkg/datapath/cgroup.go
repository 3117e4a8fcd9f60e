package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNoCgroup2 is returned when no cgroup2 file system is mounted.
var ErrNoCgroup2 = errors.New("no cgroup2 file system is mounted (mount -t cgroup2 none /sys/fs/cgroup; in a container, mount the host's)")

// rootCgroupID is the id of the root of cgroup2, whatever a namespace shows.
const rootCgroupID = 1

// Cgroup is a folder of a cgroup2 file system, and its place in the hierarchy.
type Cgroup struct {
	Path string
	// Relative is where the cgroup is from the root of this process' cgroup
	// namespace, as the kernel writes it: "/" is that root, "/../.." is the second
	// cgroup above it, "/a" is below it, and "/../a" beside it.
	Relative string
	// WholeMachine: it is the root of cgroup2, which every process is in.
	WholeMachine bool
}

// FindCgroupRoot returns the cgroup with the most processes that a mount shows.
// That is the root of cgroup2 on a node with systemd's unified or hybrid layout. A
// node that is itself a container, as kind's, has a cgroup namespace: nothing in it
// shows that root, so its pods have to do with the root of the node's namespace,
// where the node's folder is mounted, or else with that of their own.
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
		all = append(all, cgroupAt(mount, mount.path, "."))
	}

	return widest(all), nil
}

// widest returns the cgroup that no other is wider than; of equals, the first.
func widest(all []Cgroup) Cgroup {
	best := all[0]
	for _, cgroup := range all[1:] {
		if cgroup.isWiderThan(best) {
			best = cgroup
		}
	}

	return best
}

// LookupCgroup returns what is known of a folder of a cgroup2 file system.
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
		below, err := filepath.Rel(mount.path, real)
		if err == nil && mount.id == id {
			return cgroupAt(mount, path, below), nil
		}
	}

	return Cgroup{}, fmt.Errorf("cgroup %q: no mount leads there", path)
}

// cgroupAt returns the cgroup at a path, which is below (or ".") in a mount.
func cgroupAt(mount mountPoint, path, below string) Cgroup {
	c := Cgroup{Path: path, Relative: mount.root}
	if below != "." {
		c.Relative = strings.TrimSuffix(mount.root, "/") + "/" + below
	}
	id, err := cgroupID(path)
	c.WholeMachine = err == nil && id == rootCgroupID

	return c
}

// NotCovered says which sockets are not those of processes in the cgroup, or "" if
// all are.
func (c Cgroup) NotCovered() string {
	up, names := splitCgroup(c.Relative)
	switch {
	case c.WholeMachine:
		return ""
	case len(names) > 0:
		return "sockets of processes outside of this cgroup"
	case up > 0:
		return "sockets of processes outside of this cgroup: if this node is itself a container, those of the machine's other containers"
	}

	return "sockets of processes outside of this cgroup, which is the root of a cgroup namespace: " +
		"if that is a pod's, those of all other pods, whose packets are translated at their devices, and of the node, which are not translated"
}

// isWiderThan reports whether a cgroup is to be preferred to another: the root of
// cgroup2, then the one furthest above this process' cgroup namespace.
func (c Cgroup) isWiderThan(other Cgroup) bool {
	if c.WholeMachine || other.WholeMachine {
		return !other.WholeMachine
	}
	if own, others := contains(c.Relative, "/"), contains(other.Relative, "/"); own != others {
		return own
	}

	return contains(c.Relative, other.Relative) && c.Relative != other.Relative
}

// holdsThisProcess reports whether this process is known to be in a cgroup, or in
// one below it.
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

// parseOwnCgroup returns the cgroup that /proc/PID/cgroup has for cgroup2, as a
// path from the root of the reader's cgroup namespace.
func parseOwnCgroup(text string) (string, bool) {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok {
			return strings.TrimSuffix(path, " (deleted)"), true
		}
	}

	return "", false
}

// contains reports whether a cgroup is other or above it. Both are paths from the
// root of one namespace, which go up no further than they must: a path that goes
// up less is therefore below all that is up there, and below none of the cgroups
// beside.
func contains(cgroup, other string) bool {
	up, names := splitCgroup(cgroup)
	otherUp, otherNames := splitCgroup(other)
	if up != otherUp {
		return up > otherUp && len(names) == 0
	}

	return len(otherNames) >= len(names) && slices.Equal(otherNames[:len(names)], names)
}

// splitCgroup returns how many cgroups a path goes up, and the names that it goes
// down then.
func splitCgroup(path string) (up int, names []string) {
	names = strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	for len(names) > 0 && names[0] == ".." {
		up++
		names = names[1:]
	}

	return up, names
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
