package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// Memory is how much memory this process can have, with what the kernel allocates for its maps.
type Memory struct {
	Free uint64 // in bytes, without swapping
	// Limit is that of the cgroup which limits it most, and LimitedBy the file that has it; 0 and empty if only the
	// machine does.
	Limit     uint64
	LimitedBy string
}

// ReadMemory returns the memory that is left in the machine and in the cgroups of this process.
func ReadMemory() (Memory, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return Memory{}, err
	}
	_, after, _ := strings.Cut(string(text), "MemAvailable:")
	var kilobytes uint64
	if _, err := fmt.Sscan(after, &kilobytes); err != nil {
		return Memory{}, fmt.Errorf("/proc/meminfo: MemAvailable: %w", err)
	}
	m := Memory{Free: kilobytes << 10}
	for _, folder := range memoryCgroups() {
		if err := m.limitBy(folder); err != nil {
			return m, err
		}
	}

	return m, nil
}

// memoryCgroups returns the folders of the cgroups of this process that may limit its memory, of either version, as far as
// they are mounted.
func memoryCgroups() []string {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	mounts, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		isV1 := info.FSType == "cgroup" && strings.Contains(","+info.VFSOptions+",", ",memory,")

		return info.FSType != "cgroup2" && !isV1, false
	})
	if err != nil {
		return nil
	}
	var folders []string
	for line := range strings.Lines(string(own)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, path, _ := strings.Cut(rest, ":")
		for _, mount := range mounts {
			isV1 := strings.Contains(","+controllers+",", ",memory,")
			if (mount.FSType == "cgroup2") != (controllers == "") || controllers != "" && !isV1 {
				continue
			}
			// Of a cgroup that the mount does not show, the mount's own folder is the next that is seen.
			below, err := filepath.Rel(mount.Root, path)
			if err != nil || below == ".." || strings.HasPrefix(below, "../") {
				below = "."
			}
			for ; below != "."; below = filepath.Dir(below) {
				folders = append(folders, filepath.Join(mount.Mountpoint, below))
			}
			folders = append(folders, mount.Mountpoint)
		}
	}

	return folders
}

// limitBy applies the limit of a cgroup, if it has one. Files that it has read, and which no one reads any more, are free.
func (m *Memory) limitBy(folder string) error {
	for _, version := range []struct{ limit, usage, inactive string }{
		{"memory.max", "memory.current", "inactive_file"},
		{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
	} {
		text, err := os.ReadFile(filepath.Join(folder, version.limit))
		if errors.Is(err, fs.ErrNotExist) {
			continue // of the other version, or the root
		}
		if err != nil {
			return err
		}
		limit, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
		const none = 1 << 62 // version 1 has a number that stands for no limit
		if err != nil || limit >= none {
			continue // "max"
		}
		usage, err := ReadNumber(filepath.Join(folder, version.usage))
		if err != nil {
			return err
		}
		stat, err := os.ReadFile(filepath.Join(folder, "memory.stat"))
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(stat)) {
			if name, value, _ := strings.Cut(strings.TrimSpace(line), " "); name == version.inactive {
				inactive, err := strconv.Atoi(value)
				if err != nil {
					return fmt.Errorf("%s/memory.stat: %w", folder, err)
				}
				usage -= inactive
			}
		}
		m.Free = min(m.Free, limit-min(limit, uint64(max(0, usage))))
		if m.LimitedBy == "" || limit < m.Limit {
			m.Limit, m.LimitedBy = limit, filepath.Join(folder, version.limit)
		}
	}

	return nil
}
